"""The page of ``compress inspect --roofline``."""

from __future__ import annotations

from compressor.lab.roofline.roofline import Roofline
from compressor.lab.roofline.work import Work
from compressor.report import formats
from compressor.report.page import GAP, Cell, Entry, Page, Table, bullets, left, line, right

_HOW = (
    "best: if every operator stays as near to its roof as it is now. A compute-bound one gains at "
    "most the ratio of the peaks or of the products, a memory-bound one the ratio of the bytes; "
    "the rest of the time stays (Amdahl's law)"
)


def roofline_page(roofline: Roofline) -> Page:
    """Return the machine, the operators, and what compression could bring."""
    kinds = [f"{p.kind.name}: {p.kind.assumption}" for p in roofline.prospects]
    peaks = roofline.peaks
    products = ", ".join(f"{t} {_rate(f)}FLOP/s" for t, f in peaks.flops.items())
    ridge = formats.number(peaks.flops["float32"] / peaks.bandwidth, 3)
    rows = [
        [
            prospect.kind.name,
            formats.percent(prospect.share, 1),
            formats.ratio(prospect.speedup),
            "no limit" if prospect.limit is None else formats.ratio(prospect.limit),
        ]
        for prospect in roofline.prospects
    ]
    headings = right("of the time", "best speed-up", "if that took no time")
    return [
        line(f"{roofline.path}: {_run(roofline)}", "strong"),
        line(f"machine, {formats.plural(peaks.threads, 'thread')}: {products}"),
        line(
            f"memory: {_rate(peaks.bandwidth)}B/s over {formats.size(peaks.bandwidth_bytes)}; "
            f"compute-bound above {ridge} FLOP/B (float32)"
        ),
        GAP,
        _operators(roofline),
        GAP,
        Table([*left("compression"), *headings], rows),
        GAP,
        *bullets([*kinds, _HOW, *roofline.notes]),
    ]


def _run(roofline: Roofline) -> str:
    shapes = ", ".join(f"{n} {formats.shape(s)}" for n, s in roofline.inputs.items())
    times = " and ".join(
        f"{name} {formats.milliseconds(roofline.latency[name])}" for name in ("p50", "p90")
    )
    return (
        f"{formats.milliseconds(roofline.seconds * 1e3)} undisturbed ({times}) a run of {shapes}, "
        f"{roofline.runtime}"
    )


def _rate(value: float) -> str:
    text = formats.short_count(value)
    return text if text[-1:].isalpha() else f"{text} "


def _operators(roofline: Roofline) -> Table:
    columns = [
        *left("operator", "as", "type"),
        *right("FLOPs", "bytes", "FLOP/B"),
        *left("bound by"),
        *right("time", "share", "of the roof"),
    ]
    rows: list[list[Entry]] = [[*_operator(roofline, work)] for work in roofline.works]
    outside = [*_times(roofline.outside, roofline), ""]
    rows.append(["outside operators", *[""] * 6, *outside])
    flops = sum(work.flops for work in roofline.works)
    moved = sum(work.traffic.bytes for work in roofline.works)
    intensity = formats.number(flops / moved, 3) if moved else formats.NOTHING
    total = ["total", "", "", formats.short_count(flops), formats.size(moved), intensity, ""]
    total += [*_times(roofline.seconds, roofline), ""]
    rows.append([Cell(cell, style="strong") for cell in total])
    return Table(columns, rows)


def _operator(roofline: Roofline, work: Work) -> list[str]:
    reach = work.reach(roofline.peaks)
    return [
        work.name if work.count == 1 else f"{work.name} ×{work.count}",
        ", ".join(dict.fromkeys(work.kernels)) or formats.NOTHING,
        work.type if work.flops else "",
        formats.short_count(work.flops) if work.flops else formats.NOTHING,
        formats.size(work.traffic.bytes) if work.traffic.bytes else formats.NOTHING,
        formats.NOTHING if work.intensity is None else formats.number(work.intensity, 3),
        work.bound(roofline.peaks),
        *_times(work.seconds, roofline),
        formats.percent(reach, 1) if reach else formats.NOTHING,
    ]


def _times(seconds: float | None, roofline: Roofline) -> tuple[str, str]:
    if seconds is None:
        return formats.NOTHING, formats.NOTHING
    share = formats.percent(100 * seconds / roofline.seconds, 1)
    return formats.milliseconds(seconds * 1e3), share
