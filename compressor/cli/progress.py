"""Progress bars on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compressor.progress import Progress, Silent

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


@contextmanager
def shown_progress(*, enabled: bool = True) -> Iterator[Progress]:
    """Yield what shows stages on stderr where that is a terminal, and nothing elsewhere."""
    if not enabled or not sys.stderr.isatty():
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with Bars(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        yield TerminalProgress(bars)


class TerminalProgress:
    """Shows a bar for each running stage, and a line for each that is done.

    Args:
        bars: where they are drawn.
    """

    def __init__(self, bars: Bars):
        self._bars = bars

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show a stage; the yielded function takes how much of ``total`` is done."""
        task = self._bars.add_task(description, total=total, count="")
        start = time.monotonic()

        def advance(done: int) -> None:
            count = f"{done:,}" if total is None else f"{done:,}/{total:,}"
            self._bars.update(task, completed=done, count=count)

        try:
            yield advance
        finally:
            self._bars.remove_task(task)
        self.note(f"{description}  {time.monotonic() - start:.1f} s")

    def note(self, message: str) -> None:
        """Show one line that stays."""
        self._bars.console.print(message, markup=False)
