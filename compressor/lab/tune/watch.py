"""The time that a search may take: it ends a candidate between two batches, too."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from compressor.errors import SpecError
from compressor.progress import Advance

TIME_WAS_UP = "the time was up (--budget)"


class _TimeIsUpError(Exception):
    """Not an error of a user's: what handles those would throw away a training's checkpoints."""


class Watch:
    """A progress that shows nothing, and ends what reports to it when the time is up."""

    def __init__(self) -> None:
        self._end, self._ends = math.inf, False

    def start(self, seconds: float | None) -> None:
        """Let the time run; ``None`` for no end."""
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def is_up(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end

    @contextmanager
    def over(self, ends: bool) -> Iterator[None]:
        """Watch over the block.

        Args:
            ends: it is ended when the time is up. An answer needs one candidate, however long it
                takes.

        Raises:
            SpecError: the time is up.
        """
        self._ends = ends
        try:
            yield
        except _TimeIsUpError:
            raise SpecError("stopped", TIME_WAS_UP, "give it more") from None
        finally:
            self._ends = False

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Look at the time when a stage begins, and each time that it advances."""
        del description, total
        self._look()
        yield self._look

    def note(self, message: str) -> None:
        """Do nothing."""
        del message

    def _look(self, done: int = 0, text: str = "") -> None:
        del done, text
        if self._ends and self.is_up:
            raise _TimeIsUpError
