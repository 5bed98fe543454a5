"""How long work reports its progress to whoever watches."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable


class Advance(Protocol):
    """Reports how far a stage is."""

    def __call__(self, done: int, text: str = "") -> None:
        """Report how much is done, and a short text such as the loss."""
        ...


@runtime_checkable
class Progress(Protocol):
    """What shows the stages of a run."""

    def stage(self, description: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Show a stage; the yielded function takes how much of ``total`` is done."""
        ...

    def note(self, message: str) -> None:
        """Show one line that stays."""
        ...


def nobody_watches(done: int, text: str = "") -> None:
    """Report to nobody."""


class Silent:
    """Shows nothing."""

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Do nothing."""
        del description, total
        yield nobody_watches

    def note(self, message: str) -> None:
        """Do nothing."""
        del message


SILENT = Silent()


class Steps:
    """Numbers the stages of long work by the step that they belong to.

    Args:
        total: how many steps there are.
    """

    def __init__(self, progress: Progress, total: int):
        self._progress = progress
        self._total = total
        self._number = 0

    def begin(self) -> None:
        """Count the stages that follow to the next step."""
        self._number += 1

    def stage(self, description: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Show a stage with the number of its step."""
        number = f"step {self._number} of {self._total}: " if self._number else ""
        return self._progress.stage(number + description, total)

    def note(self, message: str) -> None:
        """Show one line that stays."""
        self._progress.note(message)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings and logging inside the block."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
