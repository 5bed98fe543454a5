"""Arguments, options, progress bars and printing that several commands share."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from compressor.errors import printable
from compressor.progress import Advance, Progress, Silent

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn

    from compressor.report.page import Page


_SECONDS = 10.0  # to the first line of a stage that runs, where there is no terminal
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A finite number in a range; click accepts NaN for any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
spec_argument = click.argument("spec", type=PATH)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the spec, as in --set passes.1.bits=4. May be repeated.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
force_option = click.option(
    "--force",
    is_flag=True,
    help="Write into a folder that holds other files; files of the same names are replaced.",
)
history_option = click.option(
    "--history",
    type=FILE,
    metavar="FILE",
    help="File with one line per run; shows where the metric stepped up or down.",
)
label_option = click.option(
    "--label", default="", metavar="TEXT", help="Name of this run in --history."
)
_COMPARE = (
    click.argument("base", type=PATH),
    click.argument("candidate", type=PATH),
    click.option(
        "--artifact",
        metavar="NAME",
        help="File name or format of the artifact, if the runs have several; float for the float "
        "model.",
    ),
    click.option("--base-artifact", metavar="NAME", help="The same for BASE, if it differs."),
    click.option(
        "--allow",
        type=click.Choice(("model", "version")),
        multiple=True,
        help="Compare although the float models, or the versions of compressor, differ. May be "
        "repeated.",
    ),
    click.option(
        "--timing/--no-timing",
        default=True,
        show_default=True,
        help="Time both artifacts side by side if both can run here, or use what their runs "
        "measured.",
    ),
    history_option,
)


def compare_options(function: _Function) -> _Function:
    """Add the arguments and options of commands that compare two runs."""
    for option in reversed(_COMPARE):
        function = option(function)
    return function


def near(path: Path) -> Path:
    """Return a path relative to the current folder, if it lies below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def print_result(document: Callable[[], Any], page: Callable[[], Page], *, as_json: bool) -> None:
    """Print a result on stdout: as one JSON document, or as a page for people."""
    from compressor.files import json_text
    from compressor.report.terminal import show

    if as_json:
        click.echo(json_text(document()), nl=False)
    else:
        show(page(), sys.stdout)


@contextmanager
def shown_progress(*, enabled: bool = True, lines: bool = False) -> Iterator[Progress]:
    """Show stages on stderr inside the block, if that is a terminal.

    Args:
        lines: elsewhere, print a line for each stage that is done.
    """
    if not gc.isenabled():  # the libraries are imported, and the command's work begins
        gc.freeze()
        gc.unfreeze()  # their objects are old from now on
        gc.enable()
    if not enabled or not sys.stderr.isatty():
        yield LineProgress() if enabled and lines else Silent()
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    # Not whatever is stderr later: exporters of other libraries are run with another one.
    console = Console(file=sys.stderr, highlight=False)
    with Bars(*columns(), console=console, transient=True, redirect_stdout=False) as bars:
        yield TerminalProgress(bars)


def columns() -> tuple[ProgressColumn, ...]:
    """Return the columns of a running stage: progress, text, and time.

    The time left appears as soon as there is a total and a speed to judge by.
    """
    from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        """The time left, labelled as such."""

        def render(self, task: Task) -> Text:
            if task.total is None or task.time_remaining is None:
                return Text()
            return super().render(task).append(" left")

    return (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        TimeLeft(),
    )


class LineProgress:
    """Prints a line for each stage that is done, on what is stderr now.

    A long stage also gets a line after ten seconds, and then at least every minute, whether it
    reports progress or not: CI services end jobs that print nothing.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._running: list[threading.Event] = []

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Print a finished stage and its duration."""
        start, over, reached = time.monotonic(), threading.Event(), ("", "")

        def advance(done: int, text: str = "") -> None:
            nonlocal reached
            reached = (_count(done, total), text)

        def tell() -> None:
            pause = _SECONDS
            while not over.wait(pause):
                pause = min(2 * pause, 6 * _SECONDS)
                if self._running[-1:] == [over]:  # the innermost one says what is going on
                    parts = (description, *reached, f"{time.monotonic() - start:.0f} s")
                    self.note("  ".join(part for part in parts if part))

        self._running.append(over)
        threading.Thread(target=tell, daemon=True).start()
        try:
            yield advance
        finally:
            over.set()
            self._running.remove(over)
        self.note(_done(description, start))

    def note(self, message: str) -> None:
        """Print one line."""
        click.echo(printable(message), file=self._stream)


def _done(description: str, start: float) -> str:
    return f"{description}  {time.monotonic() - start:.1f} s"


def _count(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


class TerminalProgress:
    """Shows a bar for each running stage, and a line for each that is done."""

    def __init__(self, bars: Bars):
        self._bars = bars

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Show a stage; the yielded function takes how much of ``total`` is done, and a text."""
        task = self._bars.add_task(printable(description), total=total, count="", text="")
        start = time.monotonic()

        def advance(done: int, text: str = "") -> None:
            count = _count(done, total)
            self._bars.update(task, completed=done, count=count, text=printable(text))

        try:
            yield advance
        finally:
            self._bars.remove_task(task)
        self.note(_done(description, start))

    def note(self, message: str) -> None:
        """Show one line that stays."""
        self._bars.console.print(printable(message), markup=False)
