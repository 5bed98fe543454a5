"""A picture of the model's layers in the order of execution, coloured by noise and by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compressor.report import formats
from compressor.report.verdict import Report

_MOST_BOXES = 200
_STRONGEST = 0.62  # opacity: names stay legible on it
_BOX, _GAP = (104, 34), (10, 22)
_WIDE, _NARROW = 7, 3  # boxes in a row: legible on paper, and on a telephone
_LONGEST_NAME = 16


@dataclass(frozen=True)
class Box:
    """A layer, or a block of layers.

    Attributes:
        reads: places of the boxes that it reads from.
        noise: percent of the last attributed pass's noise; ``None`` where that is not known.
        time: predicted percent of the time.
    """

    name: str
    reads: tuple[int, ...]
    noise: float | None
    time: float | None

    @property
    def label(self) -> str:
        """The end of the name, which differs most."""
        name = self.name
        return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"

    @property
    def title(self) -> str:
        """Name and numbers."""
        noise, time = self.shares
        return f"{self.name}: {noise} of the noise, {time} of the time"

    @property
    def shares(self) -> tuple[str, ...]:
        """Its shares of the noise and of the time."""
        both = (self.noise, self.time)
        return tuple(formats.NOTHING if x is None else formats.percent(x, 1) for x in both)


@dataclass(frozen=True)
class Layout:
    """Boxes in rows.

    Attributes:
        places: left and top of each box.
        links: the paths between boxes.
    """

    width: int
    height: int
    places: tuple[tuple[int, int], ...]
    links: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """The picture.

    Attributes:
        opacities: of each box by noise and by time.
        strongest: the largest shares, in words.
        blocks: boxes are blocks, since there are too many layers.
        basis: how times are known.
    """

    boxes: tuple[Box, ...]
    opacities: tuple[tuple[float, float], ...]
    strongest: tuple[str, str]
    wide: Layout
    narrow: Layout
    blocks: bool
    basis: str
    size: tuple[int, int] = _BOX

    @property
    def noisy(self) -> bool:
        """Shares of the noise are known; else there are times alone."""
        return any(box.noise is not None for box in self.boxes)


def layer_drawing(report: Report) -> Drawing | None:
    """Return the picture of the layers; ``None`` where the report holds no graph."""
    graph = report.get("graph")
    if not graph or len(graph["layers"]) < 2:
        return None
    entries = [entry["attribution"] for entry in report["passes"] if entry.get("attribution")]
    shares = {row["name"]: row["noise_share"] for e in entries[-1:] for row in e["layers"]}
    boxes = [
        Box(str(x["name"]), tuple(x["reads"]), shares.get(x["name"]), x["time_share"])
        for x in graph["layers"]
    ]
    whole = len(boxes)
    depth = max(box.name.count(".") for box in boxes)
    while len(boxes) > _MOST_BOXES and depth:
        boxes = _blocks(boxes, depth)
        depth -= 1
    boxes = boxes[:_MOST_BOXES]
    noise = max(box.noise or 0.0 for box in boxes)
    time = max(box.time or 0.0 for box in boxes)
    return Drawing(
        boxes=tuple(boxes),
        opacities=tuple((_opacity(b.noise, noise), _opacity(b.time, time)) for b in boxes),
        strongest=(formats.percent(noise, 1), formats.percent(time, 1)),
        wide=_layout(boxes, _WIDE),
        narrow=_layout(boxes, _NARROW),
        blocks=len(boxes) < whole,
        basis=str(graph["time_basis"]),
    )


def _opacity(share: float | None, largest: float) -> float:
    return round(_STRONGEST * (share or 0.0) / largest, 3) if largest > 0 else 0.0


def _blocks(boxes: Sequence[Box], depth: int) -> list[Box]:
    """Join neighbours whose names have the same first parts."""
    joined: list[Box] = []
    place: list[int] = []
    for box in boxes:
        name = ".".join(box.name.split(".")[:depth])
        if not joined or joined[-1].name != name:
            joined.append(Box(name, (), None, None))
        place.append(len(joined) - 1)
        last = joined[-1]
        reads = {place[i] for i in box.reads} - {place[-1]}
        joined[-1] = replace(
            last,
            reads=tuple(sorted({*last.reads, *reads})),
            noise=_sum(last.noise, box.noise),
            time=_sum(last.time, box.time),
        )
    return joined


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


def _layout(boxes: Sequence[Box], columns: int) -> Layout:
    (width, height), (beside, below) = _BOX, _GAP
    places = tuple(
        ((i % columns) * (width + beside), (i // columns) * (height + below))
        for i in range(len(boxes))
    )
    links = [
        _link(places[source], places[target])
        for target, box in enumerate(boxes)
        for source in box.reads
    ]
    rows = -(-len(boxes) // columns)
    wide = min(columns, len(boxes)) * (width + beside) - beside
    return Layout(wide, rows * (height + below) - below, places, tuple(links))


def _link(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the path from one box to another: straight to its neighbour, else around."""
    (width, height), (beside, below) = _BOX, _GAP
    (x, y), (to_x, to_y) = start, end
    middle = height // 2
    if y == to_y and to_x - x == width + beside:
        return f"M{x + width} {y + middle}h{beside}"
    if y == to_y:  # over a box: an arc above both
        return f"M{x + width // 2} {y}C{x + width // 2} {y - below} {to_x + width // 2} " + (
            f"{to_y - below} {to_x + width // 2} {to_y}"
        )
    x, to_x, y = x + width // 2, to_x + width // 2, y + height
    return f"M{x} {y}C{x} {y + below} {to_x} {to_y - below} {to_x} {to_y}"
