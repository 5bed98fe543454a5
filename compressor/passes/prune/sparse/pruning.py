"""Pruning of layers to patterns, by their weights alone or block by block with what they see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from compressor.errors import DataError, SpecError
from compressor.graph.layers import moment_request
from compressor.passes.prune.sparse.layers import input_channels, positions
from compressor.passes.prune.sparse.patterns import (
    Pattern,
    column_order,
    pattern_mask,
    wanda_scores,
)
from compressor.passes.prune.sparse.reordering import Reordered
from compressor.passes.prune.sparse.sparsegpt import Curvature, curvature, sparsegpt
from compressor.passes.quantize.weights.layers import nodes_of
from compressor.types.carrier import Carrier, WeightChange
from compressor.types.layers import Layer
from compressor.types.matrices import check_finite, sqnr_db
from compressor.types.passes import LayerOutcome, Outcome
from compressor.types.statistics import Blocks, Moments, Request

Criterion: TypeAlias = Literal["magnitude", "wanda", "sparsegpt"]

_SAMPLE_ROWS = 32  # the first ones, of the weights of a model that is streamed
_ROWS_PER_COLUMN = 16  # input vectors for each of their elements, from which moments are found
UNOBSERVED = "by magnitude: its input is not a value that calibration sees"


@dataclass(frozen=True, eq=False)
class Pruned:
    """Weights that have been pruned, and what was done.

    Attributes:
        weights: in the stored shape and type, by the parameter's name.
        outcomes: by layer name.
        zeros: weights of these layers that are zero.
        total: all weights of these layers.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    outcomes: dict[str, LayerOutcome] = field(default_factory=dict)
    zeros: list[int] = field(default_factory=list)
    total: list[int] = field(default_factory=list)

    def note(self) -> str:
        """Say how sparse the layers are together."""
        return _sparsity_note(sum(self.zeros), sum(self.total), len(self.total))


@dataclass(frozen=True, eq=False)
class Pruning:
    """What is to be done to the chosen layers of a model.

    Attributes:
        carrier: the model.
        patterns: how many weights of each layer stay, by layer name.
        criterion: how they are chosen.
        by_layer: the request for what flows into each layer, where there is one.
        reordered: channels that change places afterwards, so that groups are counted in their
            new order.
    """

    carrier: Carrier
    patterns: Mapping[str, Pattern]
    criterion: Criterion
    by_layer: Mapping[str, Request] = field(default_factory=dict)
    reordered: Reordered | None = None

    @property
    def requests(self) -> tuple[Request, ...]:
        """What calibration has to find; layers that read the same value share a request."""
        return tuple({request.key: request for request in self.by_layer.values()}.values())

    @property
    def remarks(self) -> Mapping[str, str]:
        """What is said in the plan about a layer, by its name."""
        if self.criterion == "magnitude":
            return {}
        return {name: UNOBSERVED for name in self.patterns if name not in self.by_layer}

    def layers(self) -> list[Layer]:
        """Return the layers that are pruned, in the model's order."""
        return [layer for layer in self.carrier.layers() if layer.name in self.patterns]

    def rows(self, layer: Layer, matrix: Tensor, start: int) -> Tensor:  # noqa: ARG002
        """Prune some rows of a layer by magnitude, ``[rows, columns]``; ``start`` is the first.

        Raises:
            ModelError: a weight is not finite.
        """
        check_finite(layer, matrix)
        return self._pruned(layer, matrix, _Seen({}))

    def by_weights(self) -> Pruned:
        """Prune by magnitude.

        Raises:
            ModelError: a weight is not finite.
        """
        done = Pruned()
        for layer in self.layers():
            self._prune(layer, _Seen({}), done)
        return done

    def by_blocks(self, blocks: Blocks) -> Pruned:
        """Prune block by block, each with what flows into it once those before are pruned.

        Raises:
            ModelError: a weight is not finite.
            DataError: calibration found nothing about a layer's input.
        """
        done = Pruned()
        layers = self.layers()
        for block in blocks:
            here = [x for x in layers if x.weight in block.weights and x.name not in done.outcomes]
            seen = _Seen(block.statistics)
            for layer in here:
                self._prune(layer, seen, done)
            block.replace({layer.weight: done.weights[layer.weight] for layer in here})
        return done

    def _prune(self, layer: Layer, seen: _Seen, done: Pruned) -> None:
        stored = self.carrier.weight(layer)
        matrix = layer.canonical(stored)
        check_finite(layer, matrix)
        pattern = self.patterns[layer.name]
        new = self._pruned(layer, matrix, seen).to(stored.dtype)
        done.weights[layer.weight] = layer.stored(new)
        done.outcomes[layer.name] = _outcome(layer, pattern, matrix, new)
        done.zeros.append(new.numel() - int(torch.count_nonzero(new)))
        done.total.append(new.numel())

    def _pruned(self, layer: Layer, matrix: Tensor, seen: _Seen) -> Tensor:
        """Prune a weight ``[rows, columns]``, with its columns in the order of its groups."""
        order = self._order(layer)
        if order is None:
            return self._in_order(layer, matrix, seen, None)
        restored = torch.empty_like(matrix)
        restored[:, order] = self._in_order(layer, matrix[:, order], seen, order)
        return restored

    def _in_order(self, layer: Layer, matrix: Tensor, seen: _Seen, order: Tensor | None) -> Tensor:
        pattern = self.patterns[layer.name]
        request = self.by_layer.get(layer.name)
        if request is None:
            return _masked(matrix, matrix.abs(), pattern)
        parts = []
        for group, rows in enumerate(matrix.chunk(layer.groups)):
            if self.criterion == "wanda":
                norms = seen.norms(layer, request)[group]
                scores = wanda_scores(rows, norms if order is None else norms[order])
                parts.append(_masked(rows, scores, pattern))
                continue
            found = seen.curvature(layer, request, group, order)
            # Where nothing flows in, no weight changes the output.
            parts.append(
                _masked(rows, rows.abs(), pattern)
                if found is None
                else sparsegpt(rows, found, pattern)
            )
        return torch.cat(parts)

    def _order(self, layer: Layer) -> Tensor | None:
        """Columns in the order in which groups are counted; ``None`` if that is as they are."""
        if not self.patterns[layer.name].m:
            return None
        new = {} if self.reordered is None else self.reordered.channels
        channels = new.get(layer.name)
        if channels is None and positions(layer) == 1:
            return None
        if channels is None:
            channels = torch.arange(input_channels(layer))
        return column_order(channels, positions(layer))


@dataclass(eq=False)
class _Seen:
    """What calibration found for a block, and the last curvature that was computed from it."""

    statistics: Mapping[str, Any]
    last: tuple[tuple[str, int, bytes], Curvature | None] | None = None

    def norms(self, layer: Layer, request: Request) -> Tensor:
        found = self.statistics.get(request.key)
        if not isinstance(found, Tensor):
            raise _nothing(layer, request)
        return found

    def curvature(
        self, layer: Layer, request: Request, group: int, order: Tensor | None
    ) -> Curvature | None:
        """Return the curvature for a group's rows; layers that read the same value share it."""
        key = (request.key, group, b"" if order is None else order.numpy().tobytes())
        if self.last is None or self.last[0] != key:
            found = self.statistics.get(request.key)
            if not isinstance(found, Moments):
                raise _nothing(layer, request)
            moment = found.second[group]
            if order is not None:
                moment = moment[order][:, order]
            self.last = (key, curvature(moment))
        return self.last[1]


def plan_pruning(
    carrier: Carrier, patterns: Mapping[str, Pattern], criterion: Criterion
) -> Pruning:
    """Return what would be done to the chosen layers of a model.

    Raises:
        SpecError: the criterion needs to see what flows into layers, and can for none.
    """
    if criterion == "magnitude":
        return Pruning(carrier, patterns, criterion)
    nodes = nodes_of(carrier.graph())
    requests = {}
    for name in patterns:
        request = moment_request(*nodes[name]) if name in nodes else None
        if request is not None:
            requests[name] = _statistic(request, criterion)
    if not requests:
        raise SpecError(
            f"criterion {criterion!r}",
            "finds no layer whose input it can see",
            "use pass prune-magnitude, or prune-nm with criterion: magnitude",
        )
    return Pruning(carrier, patterns, criterion, requests)


def pruned_outcome(carrier: Carrier, done: Pruned, reordered: Reordered | None = None) -> Outcome:
    """Return the model with its pruned weights, and what was done in the model's order.

    Args:
        carrier: the model as it was.
        done: its pruned weights, with channels where they were.
        reordered: the places that channels get now.
    """
    ordered = [done.outcomes[x.name] for x in carrier.layers() if x.name in done.outcomes]
    notes = [done.note()]
    weights = dict(done.weights)
    if reordered is not None:
        notes.append(reordered.note())
        stored = carrier.tensors()
        for name in reordered.axes:
            tensor = weights[name] if name in weights else stored[name].read()
            weights[name] = reordered.applied(name, tensor)
    return Outcome(carrier.with_weights(weights), tuple(ordered), tuple(notes))


def streamed_outcome(work: Pruning) -> Outcome:
    """Prune the weights of a model that is streamed: by magnitude, when they are read.

    What is said of each layer is found on its first rows.
    """
    outcomes = []
    layers = work.layers()
    changes = {x.weight: WeightChange(x, partial(work.rows, x)) for x in layers}
    for layer in layers:
        matrix = layer.canonical(work.carrier.weight(layer))
        rows = matrix[:_SAMPLE_ROWS]
        done = _outcome(layer, work.patterns[layer.name], rows, work.rows(layer, rows, 0))
        if len(rows) < len(matrix):
            details = {**done.details, "weight_sqnr_rows": len(rows)}
            done = replace(done, details=details)
        outcomes.append(done)
    zeros = sum(round(x.parameters * work.patterns[x.name].sparsity) for x in layers)
    note = _sparsity_note(zeros, sum(x.parameters for x in layers), len(layers))
    return Outcome(work.carrier.with_changes(changes), tuple(outcomes), (note,))


def _statistic(request: Request, criterion: Criterion) -> Request:
    if criterion == "wanda":
        return replace(request, observer="column-norm")
    return replace(request, options={**request.options, "rows_per_column": _ROWS_PER_COLUMN})


def _masked(matrix: Tensor, scores: Tensor, pattern: Pattern) -> Tensor:
    return matrix.where(pattern_mask(scores, pattern), 0.0)


def _nothing(layer: Layer, request: Request) -> DataError:
    return DataError(
        f"layer {layer.name!r}",
        f"calibration found nothing about its input {request.tensor!r}",
        "skip the layer, or prune by magnitude",
    )


def _outcome(layer: Layer, pattern: Pattern, matrix: Tensor, pruned: Tensor) -> LayerOutcome:
    """Compare a weight ``[rows, columns]`` with what has become of it."""
    sizes = matrix.to(torch.float32).abs()
    whole = float(sizes.sum(dtype=torch.float64))
    kept = float(sizes.where(pruned != 0, 0.0).sum(dtype=torch.float64))
    return LayerOutcome(
        layer.name,
        f"{layer.dtype}, {pattern}",
        sqnr_db(matrix.to(torch.float32), pruned.to(torch.float32)),
        {"kept_magnitude": kept / whole if whole else 1.0},
    )


def _sparsity_note(zeros: int, total: int, count: int) -> str:
    share = 100 * zeros / max(total, 1)
    layers = "1 layer" if count == 1 else f"{count} layers"
    return f"{zeros:,} of {total:,} weights of {layers} are zero ({share:.1f} %)"
