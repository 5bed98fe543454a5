"""How long work tells whoever watches how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Something that shows the stages of a run."""

    def stage(
        self, description: str, total: int | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Show a stage; the yielded function takes how much of ``total`` is done."""
        ...

    def note(self, message: str) -> None:
        """Show one line that stays."""
        ...


class Silent:
    """Shows nothing."""

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Do nothing."""
        del description, total
        yield lambda _: None

    def note(self, message: str) -> None:
        """Do nothing."""
        del message
