"""What a plan does to each layer, from the float model to the last pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressor.graph.costs import layer_bytes
from compressor.types.carrier import Carrier
from compressor.types.passes import LayerPlan


@dataclass(frozen=True)
class LayerRow:
    """A layer of the float model.

    Attributes:
        actions: what each pass does to it; ``-`` where the pass does not look at it.
        reasons: why and how each pass does so; empty where the action says it all.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    actions: tuple[str, ...]
    reasons: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def layer_rows(
    before: Carrier, after: Carrier, passes: Sequence[Sequence[LayerPlan]]
) -> tuple[LayerRow, ...]:
    """Return a row for each layer, in the model's order.

    Args:
        passes: what each pass does to the layers as it finds them.
    """
    sizes_before, sizes_after = layer_bytes(before), layer_bytes(after)
    plans = [{layer.name: layer for layer in layers} for layers in passes]
    rows = []
    for layer in before.layers():
        planned, names = _followed(layer.name, plans)
        rows.append(
            LayerRow(
                name=layer.name,
                kind=layer.kind,
                shape=layer.shape,
                actions=tuple("-" if o is None else o.action for o in planned),
                reasons=tuple(
                    "" if o is None else "; ".join(filter(None, (o.reason, o.remark)))
                    for o in planned
                ),
                bytes_before=sizes_before[layer.name],
                bytes_after=sum(sizes_after.get(name, 0) for name in names),
            )
        )
    return tuple(rows)


def _followed(
    name: str, plans: Sequence[Mapping[str, LayerPlan]]
) -> tuple[list[LayerPlan | None], tuple[str, ...]]:
    """Return what each pass does to a layer, and the names of what it has become at last.

    Of a layer in parts, what is shown is what happens to the part that most happens to.
    """
    names: tuple[str, ...] = (name,)
    by_pass: list[LayerPlan | None] = []
    for plan in plans:
        here = [plan[n] for n in names if n in plan]
        by_pass.append(max(here, key=lambda row: row.touched, default=None))
        names = tuple(
            part for n in names for part in ((plan[n].parts if n in plan else ()) or (n,))
        )
    return by_pass, names
