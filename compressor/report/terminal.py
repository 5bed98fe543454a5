"""Print tables: coloured and folded on a terminal, plain and of one width anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_UNBOUNDED = 10_000  # wider than any row, so that nothing is cut or folded


def show(renderable: RenderableType, stream: TextIO) -> None:
    """Print on a terminal as it likes it, and into a file or pipe as plain text."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False).print(renderable)
    else:
        stream.write(plain_text(renderable))


def plain_text(renderable: RenderableType) -> str:
    """Render without colours; the same text whatever the terminal or environment is."""
    from io import StringIO

    from rich.console import Console

    console = Console(
        file=StringIO(),
        width=_UNBOUNDED,
        color_system=None,
        force_terminal=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    with console.capture() as captured:
        console.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def plain_table() -> Table:
    """An empty table with a rule under its header and nothing else."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)


def label(text: str, style: str = "") -> Text:
    """Text that may come from a model file: control characters are shown, not obeyed."""
    from rich.text import Text

    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text(shown, style=style)
