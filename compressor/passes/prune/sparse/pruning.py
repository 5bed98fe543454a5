"""Scores and masks of layers that are pruned to patterns, from their weights and what they see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.models.layer_uses import observed_inputs
from compressor.passes.prune.maths.masked import solve_kept
from compressor.passes.prune.sparse.layers import input_channels, positions
from compressor.passes.prune.sparse.patterns import (
    Pattern,
    column_order,
    pattern_mask,
    wanda_scores,
)
from compressor.passes.prune.sparse.reordering import Orders, Reordered, find_orders
from compressor.passes.prune.sparse.sparsegpt import Curvature, curvature, sparsegpt
from compressor.run.weight_pass import WeightRows
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer
from compressor.types.statistics import Moments, Request, found_about

Criterion: TypeAlias = Literal["magnitude", "wanda", "sparsegpt"]

_ROWS_PER_COLUMN = 16  # input vectors for each of their elements, from which moments are found
_AT_ONCE = 1 << 20  # weights that are sorted at once


def requests_for(
    carrier: Carrier, names: Mapping[str, Pattern], criterion: Criterion, *, solves: bool = False
) -> dict[str, Request]:
    """Return what a criterion has to know of each layer's input, by layer name.

    To solve the weights that stay takes the inputs' second moment, whatever the criterion.

    Layers whose input calibration does not see have none; they are pruned by magnitude.

    Raises:
        SpecError: the criterion needs to see what flows into layers, and can for none.
    """
    if criterion == "magnitude" and not solves:
        return {}
    requests = {
        name: request for name, request in observed_inputs(carrier).items() if name in names
    }
    if not requests:
        raise SpecError(
            f"criterion {criterion!r}" if criterion != "magnitude" else "reconstruct",
            "needs the input of layers, and calibration sees that of none",
            "use pass prune-magnitude, or prune-nm with criterion: magnitude and reconstruct: "
            "false",
        )
    if criterion == "wanda" and not solves:
        return {
            name: replace(request, observer="column-norm") for name, request in requests.items()
        }
    more = {"rows_per_column": _ROWS_PER_COLUMN}
    return {n: replace(r, options={**r.options, **more}) for n, r in requests.items()}


@dataclass(eq=False)
class Pruner:
    """Prunes one layer after the other."""

    criterion: Criterion  # how weights are chosen
    solves: bool = False  # those that stay are solved then
    orders: Orders | None = None  # which channels may change places, if any are to
    # their new places, in which groups are counted; found once weights are read
    reordered: Reordered | None = None
    # the curvature computed last, and what it was computed from: layers that read the same value
    # share it
    last: tuple[Moments, tuple[int, bytes], Curvature | None] | None = None

    def find_orders(self, carrier: Carrier) -> None:
        """Find the channels' new places, unless they are known or stay."""
        if self.orders is not None and self.reordered is None:
            self.reordered = find_orders(carrier, self.orders)

    def forget(self) -> None:
        """Give back what is kept for layers that read the same value."""
        self.last = None

    def pruned(
        self,
        rows: WeightRows,
        pattern: Pattern,
        request: Request | None,
        statistics: Mapping[str, Any],
    ) -> Tensor:
        """Return a weight ``[rows, columns]`` with zeros in it, columns in the order they have.

        Raises:
            DataError: calibration found nothing about the layer's input.
        """
        layer, matrix = rows.layer, rows.matrix
        order = self._order(layer, pattern)
        ordered = matrix if order is None else matrix[:, order]
        if request is None:
            pruned = _masked(ordered, torch.abs, pattern)
        else:
            kind: type[Tensor | Moments] = (
                Tensor if self.criterion == "wanda" and not self.solves else Moments
            )
            observed = found_about(layer.name, request, statistics, kind, "prune by magnitude")
            parts = ordered.chunk(layer.groups)
            made = [self._group(x, observed, n, order, pattern) for n, x in enumerate(parts)]
            pruned = made[0] if len(made) == 1 else torch.cat(made)
        if order is None:
            return pruned
        restored = torch.empty_like(matrix)
        restored[:, order] = pruned
        return restored

    def _group(
        self,
        rows: Tensor,
        observed: Tensor | Moments,
        group: int,
        order: Tensor | None,
        pattern: Pattern,
    ) -> Tensor:
        if isinstance(observed, Tensor):
            norms = observed[group]
            norms = norms if order is None else norms[order]
            return _masked(rows, partial(wanda_scores, norms=norms), pattern)
        if self.solves:
            moment = observed.second[group]
            moment = moment if order is None else moment[order][:, order]
            return solve_kept(rows, self._started(rows, moment, pattern), moment)
        place = (group, b"" if order is None else order.numpy().tobytes())
        if self.last is None or self.last[0] is not observed or self.last[1] != place:
            moment = observed.second[group]
            if order is not None:
                moment = moment[order][:, order]
            self.forget()  # a factor takes as much as the moment
            self.last = (observed, place, curvature(moment))
        curved = self.last[2]
        # Where nothing flows in, no weight changes the output.
        if curved is None:
            return _masked(rows, torch.abs, pattern)
        return sparsegpt(rows, curved, pattern)

    def _started(self, rows: Tensor, moment: Tensor, pattern: Pattern) -> Tensor:
        """Return rows with zeros, before what stays is solved."""
        if self.criterion == "wanda":
            norms = moment.diagonal().clamp(min=0.0).sqrt()
            return _masked(rows, partial(wanda_scores, norms=norms), pattern)
        curved = curvature(moment) if self.criterion == "sparsegpt" else None
        return (
            _masked(rows, torch.abs, pattern)
            if curved is None
            else sparsegpt(rows, curved, pattern)
        )

    def _order(self, layer: Layer, pattern: Pattern) -> Tensor | None:
        """Columns in the order in which groups are counted; ``None`` if that is as they are."""
        if not pattern.m:
            return None
        channels = None if self.reordered is None else self.reordered.channels.get(layer.name)
        if channels is None and positions(layer) == 1:
            return None
        if channels is None:
            channels = torch.arange(input_channels(layer))
        return column_order(channels, positions(layer))


def _masked(matrix: Tensor, scores: Callable[[Tensor], Tensor], pattern: Pattern) -> Tensor:
    """Put zeros where scores are low, some rows at a time: to sort takes several times their bytes.

    Args:
        scores: returns those of some rows.
    """
    parts = torch.split(matrix, max(1, _AT_ONCE // max(matrix.shape[1], 1)))
    return torch.cat([part.where(pattern_mask(scores(part), pattern), 0.0) for part in parts])
