"""The page of ``compress inspect --roofline``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.report import formats
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from compressor.lab.roofline.roofline import Roofline
    from compressor.lab.roofline.work import Work

_FAINT = "dim"
_TOTAL = "in all"


def roofline_page(roofline: Roofline) -> Group:
    """Return the machine, the operators, and what compression could bring."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        label(f"{roofline.path}: {_run(roofline)}", "bold"),
        *(label(line) for line in _machine(roofline)),
        Text(),
        _operators(roofline),
        Text(),
        _prospects(roofline),
        Text(),
        *(
            label(f"- {found.kind.name}: {found.kind.assumption}", _FAINT)
            for found in roofline.prospects
        ),
        label(f"- {_HOW}", _FAINT),
        *(label(f"- {note}", _FAINT) for note in roofline.notes),
    ]
    return Group(*parts)


_HOW = (
    "best: if every operator stays as near to its roof as it is. What is bound by computing gains "
    "at most the ratio of the peaks or of the products, what is bound by memory that of the "
    "bytes; the rest of the time stays (Amdahl's law)"
)


def _run(roofline: Roofline) -> str:
    shapes = ", ".join(f"{n} {formats.shape(s)}" for n, s in roofline.inputs.items())
    times = " and ".join(
        f"{name} {formats.milliseconds(roofline.latency[name])}" for name in ("p50", "p90")
    )
    return (
        f"{formats.milliseconds(roofline.seconds * 1e3)} undisturbed ({times}) a run of {shapes}, "
        f"{roofline.runtime}"
    )


def _machine(roofline: Roofline) -> list[str]:
    peaks = roofline.peaks
    products = ", ".join(f"{t} {_rate(f)}FLOP/s" for t, f in peaks.flops.items())
    return [
        f"machine, {formats.plural(peaks.threads, 'thread')}: {products}",
        f"memory: {_rate(peaks.bandwidth)}B/s over {formats.size(peaks.bandwidth_bytes)}; "
        f"computing bounds above {_ridge(roofline)} FLOP/B (float32)",
    ]


def _ridge(roofline: Roofline) -> str:
    peaks = roofline.peaks
    return formats.number(peaks.flops["float32"] / peaks.bandwidth, 3)


def _rate(value: float) -> str:
    """Format a rate with its prefix, ``250 G``."""
    text = formats.short_count(value)
    return text if text[-1:].isalpha() else f"{text} "


def _operators(roofline: Roofline) -> Table:
    table = plain_table()
    for heading in ("operator", "as", "type"):
        table.add_column(heading, overflow="fold")
    for heading in ("FLOPs", "bytes", "FLOP/B"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("bound by", overflow="fold")
    for heading in ("time", "share", "of the roof"):
        table.add_column(heading, justify="right", overflow="fold")
    for work in roofline.works:
        table.add_row(*_row(roofline, work))
    table.add_row(*_plain("outside operators", roofline.outside, roofline))
    flops = sum(work.flops for work in roofline.works)
    moved = sum(work.traffic.bytes for work in roofline.works)
    total = [
        _TOTAL,
        "",
        "",
        formats.short_count(flops),
        formats.size(moved),
        formats.number(flops / moved, 3) if moved else formats.NOTHING,
        "",
        formats.milliseconds(roofline.seconds * 1e3),
        formats.percent(100, 1),
        "",
    ]
    table.add_row(*(label(cell, "bold") for cell in total))
    return table


def _row(roofline: Roofline, work: Work) -> list[Text]:
    name = work.name if work.count == 1 else f"{work.name} ×{work.count}"
    reach = work.reach(roofline.peaks)
    cells = [
        name,
        ", ".join(dict.fromkeys(work.kernels)) or formats.NOTHING,
        work.type if work.flops else "",
        formats.short_count(work.flops) if work.flops else formats.NOTHING,
        formats.size(work.traffic.bytes) if work.traffic.bytes else formats.NOTHING,
        formats.NOTHING if work.intensity is None else formats.number(work.intensity, 3),
        work.bound(roofline.peaks),
        formats.NOTHING if work.seconds is None else formats.milliseconds(work.seconds * 1e3),
        formats.NOTHING if work.seconds is None else _share(work.seconds, roofline),
        formats.NOTHING if not reach else formats.percent(reach, 1),
    ]
    return [label(cell) for cell in cells]


def _plain(name: str, seconds: float, roofline: Roofline) -> list[Text]:
    cells = [name, "", "", "", "", "", "", formats.milliseconds(seconds * 1e3)]
    return [label(cell) for cell in (*cells, _share(seconds, roofline), "")]


def _share(seconds: float, roofline: Roofline) -> str:
    return formats.percent(100 * seconds / roofline.seconds, 1)


def _prospects(roofline: Roofline) -> Table:
    table = plain_table()
    table.add_column("compression", overflow="fold")
    for heading in ("of the time", "best speed-up", "if that took no time"):
        table.add_column(heading, justify="right", overflow="fold")
    for found in roofline.prospects:
        cells = (
            found.kind.name,
            formats.percent(found.share, 1),
            formats.ratio(found.speedup),
            "no limit" if found.limit is None else formats.ratio(found.limit),
        )
        table.add_row(*(label(cell) for cell in cells))
    return table
