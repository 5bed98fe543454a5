"""``quantize-cache``: what attention keeps of earlier tokens, in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from compressor.errors import DataError, SpecError
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.models.transformers.cached_attention import PROJECTIONS
from compressor.models.transformers.decoder import KEYS, VALUES
from compressor.passes.quantize.weights.inputs import COMPRESSED_TENSORS
from compressor.run.weight_pass import Changes
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer
from compressor.types.passes import GraphPass, LayerOutcome, Outcome, PassContext, Survey
from compressor.types.rounded_inputs import CacheScheme, InputScheme
from compressor.types.statistics import Block, Range, Request

_SCHEME = InputScheme("fp8-e4m3", static=True)
_ENDS = {"keys": KEYS, "values": VALUES}
_LARGEST = "largest_"  # what details begin with that say how far keys or values went


class QuantizeCache(GraphPass):
    """Store a scale for the keys, and one for the values, that each attention keeps in 8 bits.

    A server keeps the keys and values of all tokens of each conversation, which soon take more
    memory than the weights: half of it where they are `fp8-e4m3`, so that twice as many
    conversations fit. For that it needs to know how large they become, which this pass finds on
    text: the greatest magnitude becomes the largest code. It takes the checkpoint of a causal
    language model, block by block, and changes no weights. The scales go into the layout
    compressed-tensors. Put the pass behind those that change weights, so that the text goes
    through what is served.
    """

    name: ClassVar[str] = "quantize-cache"
    source: ClassVar[str] = "Micikevicius et al. 2022 (arXiv:2209.05433) for e4m3"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})

    @property
    def in_blocks(self) -> bool:
        """Whether the checkpoint of a causal language model is taken, block by block."""
        return True

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers that write what attention keeps, and ask how far that goes.

        Raises:
            SpecError: the model is not such a checkpoint, or an export has no place for scales.
        """
        written = _written(_checked(carrier, context.targets))
        actions = {n: f"{' and '.join(parts)} in {_SCHEME.format}" for n, parts in written.items()}
        unkept = "attention keeps nothing of what it writes"
        reasons = {x.name: "" if x.name in written else unkept for x in carrier.layers()}
        requests = [_request(name, part) for name, parts in written.items() for part in parts]
        return Survey(plan_layers(self.name, actions, reasons), tuple(requests))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Find the scales.

        Raises:
            DataError: calibration has seen no keys or values of some attention.
        """
        blocks = _checked(carrier, context.targets)
        written = _written(blocks)
        found: dict[str, LayerOutcome] = {}
        for stage in context.blocks or ():
            weights = set(stage.weights)
            here = [x for x in carrier.layers() if x.name in written and x.weight in weights]
            if here:
                made = stage.kept(partial(_observed, here, written, stage))
                found.update(made.outcomes)
        outcomes = [found[layer.name] for layer in carrier.layers() if layer.name in found]
        return Outcome(blocks.with_caches(_schemes(outcomes)), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model with a place for each scale."""
        blocks = _checked(carrier, context.targets)
        return blocks.with_caches({_attention(n): _EMPTY for n in _written(blocks)})


_EMPTY = CacheScheme(_SCHEME, _SCHEME)


def _checked(carrier: Carrier, targets: frozenset[str]) -> BlockCheckpoint:
    if not isinstance(carrier, BlockCheckpoint):
        raise SpecError(
            "pass quantize-cache",
            "reads the checkpoint of a causal language model block by block, and this is a "
            f"{carrier.kind} model without blocks",
            "name the directory as model.checkpoint, leave out model.factory, and give "
            "data.calibration",
        )
    others = targets - {COMPRESSED_TENSORS}
    if others:
        raise SpecError(
            "pass quantize-cache",
            f"finds scales that have no place in {' or '.join(sorted(others))}",
            "export the layout compressed-tensors alone",
        )
    return carrier


def _written(carrier: BlockCheckpoint) -> dict[str, tuple[str, ...]]:
    """Return which of keys and values each layer writes that attention keeps; others are left out.

    Raises:
        SpecError: there is no attention whose cache has a place for scales.
    """
    found = {}
    for layer in carrier.layers():
        leaf = layer.name.rpartition(".")[2]
        if leaf in PROJECTIONS and _attention(layer.name) in carrier.decoder.attention:
            found[layer.name] = PROJECTIONS[leaf]
    if not found:
        raise SpecError(
            "pass quantize-cache",
            f"finds no attention with a cache and a layer {', '.join(PROJECTIONS)}",
            "leave out the pass",
        )
    return found


def _attention(layer: str) -> str:
    return layer.rpartition(".")[0]


def _request(layer: str, part: str) -> Request:
    return Request(f"{_attention(layer)}{_ENDS[part]}", "min-max")


def _observed(
    layers: Sequence[Layer], written: Mapping[str, tuple[str, ...]], stage: Block
) -> Changes:
    """Return how far the keys or values went that layers of a stage write."""
    changes = Changes()
    for layer in layers:
        details = {}
        for part in written[layer.name]:
            span = stage.statistics.get(_request(layer.name, part).key)
            if not isinstance(span, Range):
                raise DataError(
                    f"layer {layer.name!r}",
                    f"calibration has seen none of the {part} that it writes",
                    "leave out the pass quantize-cache",
                )
            details[f"{_LARGEST}{part}"] = max(-span.low, span.high)
        scheme = f"{layer.dtype}, {' and '.join(written[layer.name])} {_SCHEME.format}/tensor"
        changes.outcomes[layer.name] = LayerOutcome(layer.name, scheme, details=details)
    return changes


def _schemes(outcomes: Sequence[LayerOutcome]) -> dict[str, CacheScheme]:
    """Return the schemes of all attention, from what was kept of its layers."""
    largest: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        largest.setdefault(_attention(outcome.name), {}).update(outcome.details)
    return {
        path: CacheScheme(
            *(replace(_SCHEME, largest=found[f"{_LARGEST}{part}"]) for part in ("keys", "values"))
        )
        for path, found in largest.items()
    }
