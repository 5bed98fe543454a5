"""``quantize-cache``: what attention keeps of earlier tokens, in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field

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
from compressor.types.rounded_inputs import CacheFormat, CacheScheme, Part
from compressor.types.statistics import Block, ChannelSpans, Request

_GENAI = "genai"
_PLACES: Mapping[CacheFormat, str] = {
    "fp8-e4m3": COMPRESSED_TENSORS,
    "int8": _GENAI,
    "int4": _GENAI,
}
"""Which export has a place for the scales of a format."""

_ENDS: Mapping[Part, str] = {"keys": KEYS, "values": VALUES}
_LARGEST = "largest_"  # what details begin with that say how far codes of keys or values reach


class QuantizeCache(GraphPass):
    """Store scales for the keys and values that each attention keeps in 8 or 4 bits.

    A server keeps the keys and values of all tokens of each conversation, which soon take more
    memory than the weights. In 8 bits they take half the memory of bfloat16 and a quarter of
    float32. This pass finds the scales on text. It takes the checkpoint of a causal language model,
    block by block, and changes no weights. `fp8-e4m3` has one scale for the keys and one for the
    values of an attention, in the layout compressed-tensors; `int8` and `int4` have one for each
    channel of each head, in the format genai. The greatest magnitude becomes the largest code, but
    4 bits clip what is rare: their scales are those of least squared error. Put the pass after
    those that change weights, so that the text runs through the served model.
    """

    name: ClassVar[str] = "quantize-cache"
    version: ClassVar[int] = 2
    source: ClassVar[str] = (
        "Micikevicius et al. 2022 (arXiv:2209.05433) for e4m3; Liu et al. 2024 (arXiv:2402.02750, "
        "section 3) for keys by channel"
    )
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})

    format: CacheFormat = Field(
        default="fp8-e4m3",
        description="what keys and values are kept as: fp8-e4m3 for the layout compressed-tensors, "
        "int8 or int4 for the format genai",
    )

    @property
    def in_blocks(self) -> bool:
        """Whether the checkpoint of a causal language model is taken, block by block."""
        return True

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers that write what attention keeps, and ask how far that goes.

        Raises:
            SpecError: the model is not such a checkpoint, or an export has no place for scales.
        """
        written = _written(self._checked(carrier, context.targets))
        actions = {n: f"{' and '.join(parts)} in {self.format}" for n, parts in written.items()}
        unkept = "attention does not cache what it writes"
        reasons = {x.name: "" if x.name in written else unkept for x in carrier.layers()}
        requests = [self._request(n, part) for n, parts in written.items() for part in parts]
        return Survey(plan_layers(self.name, actions, reasons), tuple(requests))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Find the scales.

        Raises:
            DataError: calibration has seen no keys or values of some attention.
        """
        blocks = self._checked(carrier, context.targets)
        written = _written(blocks)
        found = Changes()
        for stage in context.blocks or ():
            weights = set(stage.weights)
            here = [x for x in carrier.layers() if x.name in written and x.weight in weights]
            if here:
                made = stage.kept(partial(self._observed, here, written, stage))
                found.outcomes.update(made.outcomes)
                found.spans.update(made.spans)
        outcomes = [found.outcomes[x.name] for x in carrier.layers() if x.name in found.outcomes]
        attention = dict.fromkeys(_attention(outcome.name) for outcome in outcomes)
        caches = {
            path: CacheScheme(self.format, *(found.spans[f"{path}{end}"] for end in _ENDS.values()))
            for path in attention
        }
        return Outcome(blocks.with_caches(caches), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model with a place for each scale."""
        blocks = self._checked(carrier, context.targets)
        empty = CacheScheme(self.format)
        return blocks.with_caches({_attention(name): empty for name in _written(blocks)})

    def _checked(self, carrier: Carrier, targets: frozenset[str]) -> BlockCheckpoint:
        if not isinstance(carrier, BlockCheckpoint):
            raise SpecError(
                "pass quantize-cache",
                "reads the checkpoint of a causal language model block by block, and this is a "
                f"{carrier.kind} model without blocks",
                "name the directory as model.checkpoint, leave out model.factory, and give "
                "data.calibration",
            )
        others = targets - {_PLACES[self.format]}
        if others:
            takes = [name for name, place in _PLACES.items() if {place} == others]
            raise SpecError(
                "pass quantize-cache",
                f"finds scales of {self.format} that have no place in "
                f"{' or '.join(sorted(others))}",
                f"take format {' or '.join(takes)} (of compress quantize: --kv-cache "
                f"{takes[0].partition('-')[0]}), or export {_PLACES[self.format]}"
                if takes
                else f"export {_PLACES[self.format]} alone",
            )
        return carrier

    def _request(self, layer: str, part: Part) -> Request:
        value, options = f"{_attention(layer)}{_ENDS[part]}", {"axis": 2}
        if self.format == "int4":
            return Request(value, "channel-clip", {**options, "bits": CacheScheme("int4").bits})
        return Request(value, "channel-spans", options)

    def _observed(
        self, layers: Sequence[Layer], written: Mapping[str, tuple[Part, ...]], stage: Block
    ) -> Changes:
        """Return what codes are to reach of the keys or values that layers of a stage write."""
        changes = Changes()
        shared = "tensor" if self.format == "fp8-e4m3" else "channel"
        for layer in layers:
            details = {}
            for part in written[layer.name]:
                seen = stage.statistics.get(self._request(layer.name, part).key)
                if not isinstance(seen, ChannelSpans | torch.Tensor):
                    raise DataError(
                        f"layer {layer.name!r}",
                        f"calibration has seen none of the {part} that it writes",
                        "leave out the pass quantize-cache",
                    )
                largest = seen if isinstance(seen, torch.Tensor) else seen.seen.amax(0)
                details[f"{_LARGEST}{part}"] = float(largest.max())
                spans = (largest.max()[None] if shared == "tensor" else largest).tolist()
                changes.spans[f"{_attention(layer.name)}{_ENDS[part]}"] = tuple(spans)
            kept = f"{' and '.join(written[layer.name])} {self.format}/{shared}"
            scheme = f"{layer.dtype}, {kept}"
            changes.outcomes[layer.name] = LayerOutcome(layer.name, scheme, details=details)
        return changes


def _written(carrier: BlockCheckpoint) -> dict[str, tuple[Part, ...]]:
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
