"""What a plan does to each layer, from the float model to the last pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressor.graph.costs import layer_bytes
from compressor.types.carrier import Carrier
from compressor.types.passes import LayerPlan


@dataclass(frozen=True)
class LayerRow:
    """A layer of the float model, or one that a pass makes.

    Attributes:
        actions: what each pass does to it; ``-`` where the pass does not look at it.
        reasons: why and how each pass does so; empty where the action says it all.
        bytes_before: in the float model, or as the pass leaves it that makes the layer.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    actions: tuple[str, ...]
    reasons: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def layer_rows(
    before: Carrier, previews: Sequence[Carrier], passes: Sequence[Sequence[LayerPlan]]
) -> tuple[LayerRow, ...]:
    """Return a row for each layer, in the model's order; behind them, of those that passes make.

    Args:
        previews: the model after each pass.
        passes: what each pass does to the layers as it finds them.
    """
    plans = [{layer.name: layer for layer in layers} for layers in passes]
    sizes_after = layer_bytes(previews[-1] if previews else before)
    rows, seen = list[LayerRow](), set[str]()
    for index, carrier in enumerate([before, *previews]):
        sizes = layer_bytes(carrier)
        for layer in carrier.layers():
            if layer.name in seen:
                continue
            # A pass that works on a graph may list the layers of that graph, as qat does.
            first = max(index - 1, 0)
            followed, names = _followed(layer.name, plans[first:], seen)
            planned = [*(None for _ in range(first)), *followed]
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
                    bytes_before=sizes[layer.name],
                    bytes_after=sum(sizes_after.get(name, 0) for name in names),
                )
            )
    return tuple(rows)


def _followed(
    name: str, plans: Sequence[Mapping[str, LayerPlan]], seen: set[str]
) -> tuple[list[LayerPlan | None], tuple[str, ...]]:
    """Return what each pass does to a layer, and the names of what it has become at last.

    Of a layer in parts, what is shown is what happens to the part that most happens to.

    Args:
        seen: takes all names that the layer has on the way.
    """
    names: tuple[str, ...] = (name,)
    by_pass: list[LayerPlan | None] = []
    for plan in plans:
        here = [plan[n] for n in names if n in plan]
        by_pass.append(max(here, key=lambda row: row.touched, default=None))
        seen.update(names)
        names = tuple(
            part for n in names for part in ((plan[n].parts if n in plan else ()) or (n,))
        )
    seen.update(names)
    return by_pass, names
