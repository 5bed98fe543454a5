"""The time that a search may take: what does not fit is not begun, or ends between two batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from compressor.errors import SpecError
from compressor.progress import Advance

Work = Literal["make", "search", "noise", "time", "prove"]
"""What a search spends its time on."""

BUDGET = "(--budget)"
TIME_WAS_UP = f"the time was up {BUDGET}"
CANDIDATE: Mapping[Work, int] = {"make": 1, "search": 1}
PROOFS: Mapping[Work, int] = {"prove": 2}
"""What is kept for the end: a safe candidate is proved, and the one that is aimed at."""

_WITHOUT_FLOAT = 0.5  # share of the first time that the second is expected to take


class LateError(SpecError):
    """What was begun does not fit into the time."""


class _TimeIsUpError(Exception):
    """Not an error of a user's: what handles those would throw away a training's checkpoints."""


@dataclass
class Watch:
    """A progress that shows nothing, and ends what reports to it when the time is up.

    Attributes:
        took: the seconds that each kind of work took the last two times: on this machine, as busy
            as it is now.
    """

    took: dict[Work, list[float]] = field(default_factory=dict)
    _end: float = math.inf
    _stop: float = math.inf

    def start(self, seconds: float | None) -> None:
        """Let the time run; ``None`` for no end."""
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """The seconds that are left for more candidates; ``None`` for no end."""
        if self._end == math.inf:
            return None
        return max(0.0, self._end - time.monotonic() - self._expected(PROOFS))

    def late_for(self, works: Mapping[Work, int], kept: Mapping[Work, int] = PROOFS) -> str:
        """Return why work does not fit into the time that is left; empty where it does.

        Args:
            works: how often each kind of work is to be done.
            kept: what is to follow it.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            return TIME_WAS_UP
        needs, rest = self._expected(works), left - self._expected(kept)
        if needs <= rest:
            return ""
        beside = " beside the proofs" if kept else ""
        return f"it takes about {needs:.0f} s, and {max(rest, 0):.0f} s were left{beside} {BUDGET}"

    def number_of(self, work: Work, most: int) -> int:
        """Return how often work can still be done, at least once."""
        left, each = self._end - time.monotonic(), self._expected({work: 1})
        return most if left >= most * each else max(1, int(left / each))

    def _expected(self, works: Mapping[Work, int]) -> float:
        """Return the seconds that work takes; of the first, half is taken for the float model's."""
        return sum(
            number * (min(took) if len(took) > 1 else sum(took) * _WITHOUT_FLOAT)
            for work, number in works.items()
            if (took := self.took.get(work, []))
        )

    def expect(self, work: Work, seconds: float) -> None:
        """Note how long a kind of work takes, as far as that is not known."""
        if work not in self.took:
            self.took[work] = [seconds / _WITHOUT_FLOAT]

    @contextmanager
    def over(self, work: Work, *, ends: bool, kept: Mapping[Work, int] = PROOFS) -> Iterator[None]:
        """Watch over the block, and note how long it takes.

        Args:
            ends: it is ended when the time is up. An answer needs one candidate, however long it
                takes.
            kept: what is to follow it in time.

        Raises:
            LateError: the time is up.
        """
        began, outside = time.monotonic(), self._stop
        self._stop = self._end - self._expected(kept) if ends else math.inf
        try:
            yield
        except _TimeIsUpError:
            raise LateError("stopped", TIME_WAS_UP, "give it more") from None
        finally:
            self._stop = outside
        self.took[work] = [*self.took.get(work, [])[-1:], time.monotonic() - began]

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
        if self._stop < math.inf and time.monotonic() >= self._stop:
            raise _TimeIsUpError
