"""What a page says, apart from how it is laid out: lines of text, and tables of cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from compressor.run.verdicts.verdicts import Verdict

Style = Literal["", "strong", "faint", "good", "bad", "open"]


@dataclass(frozen=True)
class Bar:
    """A bar in a cell, for HTML.

    Attributes:
        length: in percent of the longest.
        ours: it stands for an artifact, not for the float model.
        over: it is longer than it may be.
        tick: place of the limit, in percent; ``None`` without one.
    """

    length: float
    ours: bool
    over: bool = False
    tick: float | None = None


@dataclass(frozen=True)
class Interval:
    """A measured interval on an axis from 0 to 100, for HTML.

    Attributes:
        limit: the worst value that the limits allow; ``None`` without a limit.
    """

    low: float
    at: float
    high: float
    reference: float
    limit: float | None
    label: str


@dataclass(frozen=True)
class Cell:
    """A number, a name or a few words.

    Attributes:
        note: goes with it in brackets, such as an interval; a terminal leaves it out.
        tag: a word after a name.
        small: further words, for HTML only, such as why there is no number.
        code: it is the name of a file, a layer or a pass.
        verdict: whether something passed; empty where that is not the question.
        style: how it is emphasized on a terminal.
        chart: what is drawn beside it, for HTML only.
        items: a list below it, for HTML only.
    """

    text: str = ""
    note: str = ""
    tag: str = ""
    small: str = ""
    code: bool = False
    verdict: Verdict | Literal[""] = ""
    style: Style = ""
    chart: Bar | Interval | None = None
    items: tuple[str, ...] = ()


Entry: TypeAlias = str | Cell


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        kind: numbers are set to the right; words need room; charts are for HTML only.
        note: goes with the heading in brackets; a terminal leaves it out.
        brief: the heading on a terminal, if it is another one.
        title: the heading in HTML, if it is not the same with a capital letter.
        code: the heading is a name.
        html: only HTML has room for it.
    """

    heading: str
    kind: Literal["", "number", "words", "chart"] = ""
    note: str = ""
    brief: str = ""
    title: str = ""
    code: bool = False
    html: bool = False


@dataclass(frozen=True)
class Table:
    """A table; without headings, a list of facts in columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]

    def picked(self, keep: Sequence[bool]) -> Table:
        """Return the table with some of its columns."""
        columns = [c for c, kept in zip(self.columns, keep, strict=True) if kept]
        rows = [[e for e, kept in zip(r, keep, strict=True) if kept] for r in self.rows]
        return Table(columns, rows)

    @property
    def narrow(self) -> Table:
        """The table without what only HTML has room for."""
        return self.picked([not column.html for column in self.columns])


@dataclass(frozen=True)
class Line:
    """A line of text; without parts, an empty one."""

    parts: Sequence[Entry] = ()
    bullet: bool = False


Block: TypeAlias = Line | Table
Page: TypeAlias = Sequence[Block]
GAP = Line()


def left(*headings: str) -> list[Column]:
    """Return columns of names and words."""
    return [Column(heading) for heading in headings]


def right(*headings: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(heading, "number") for heading in headings]


def line(text: str, style: Style = "") -> Line:
    """Return a line in one style."""
    return Line((Cell(text, style=style),))


def bullets(texts: Iterable[str], style: Style = "faint") -> list[Line]:
    """Return a list of remarks, one a line."""
    return [Line((Cell(text, style=style),), bullet=True) for text in texts]
