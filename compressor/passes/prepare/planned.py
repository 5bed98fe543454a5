"""What a plan says of the channels of each layer: which can be scaled, and which keep their scale.

Both only by structure: what is scaled in the end depends on the calibration data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compressor.passes.prepare.balance import Rounding, span_requests
from compressor.passes.prepare.scales import ScaleMap
from compressor.types.layers import Layer


@dataclass(frozen=True)
class Scalable:
    """What can be scaled at a layer.

    Attributes:
        channels: such as ``input and output channels``.
        how: with which layer's channels, the first of those that share them, and through which
            operators; empty where both go without saying.
    """

    channels: str
    how: str

    @property
    def remark(self) -> str:
        """What may be done, in one phrase."""
        return f"may scale {self.channels}" + (f": {self.how}" if self.how else "")


def scalable(scales: ScaleMap, rounding: Rounding) -> Mapping[str, Scalable]:
    """Return what can be scaled at each layer, by its name; layers without are left out.

    Args:
        rounding: what is going to be quantized: groups without any of that are not looked at.
    """
    sides: dict[str, dict[str, str]] = {}
    nodes = set[str]()
    for group in scales.groups:
        if not span_requests(replace(scales, groups=(group,)), rounding):
            continue
        read, written = ([x.layer.name for x in side] for side in (group.reads, group.writes))
        through = f"through {_listed(group.through)}" if group.through else ""
        nodes.update(read if group.inserted else ())
        for side, names in (("input", read), ("output", written)):
            for name in names:
                shared = "" if group.inserted or group.name == name else f"with {group.name}"
                sides.setdefault(name, {})[side] = " ".join(filter(None, (shared, through)))
    return {
        name: Scalable(
            f"{' and '.join(sorted(both))} channels{' (a Mul)' if name in nodes else ''}",
            "; ".join(
                how if len(both) == 1 else f"{s} {how}" for s, how in sorted(both.items()) if how
            ),
        )
        for name, both in sides.items()
    }


def nothing_to_scale(scales: ScaleMap) -> str:
    """Return that a model has no channels to scale, and the most frequent reason."""
    return "no channels can be scaled" + (f": {scales.reason}" if scales.reason else "")


def unscalable(scales: ScaleMap, layer: Layer) -> str:
    """Return why no channels of a layer can be scaled; empty where that is not known."""
    values = [*layer.inputs[:1], layer.output]
    reasons = dict.fromkeys(scales.reasons[name] for name in values if name in scales.reasons)
    return "; ".join(reasons) or scales.reason


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
