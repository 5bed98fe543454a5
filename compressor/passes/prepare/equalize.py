"""``equalize`` and ``smooth``: scale channels, so that quantization loses less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.passes.prepare.balance import Balance, Rounding, balance, span_requests
from compressor.passes.prepare.block_products import (
    BlockScales,
    block_scales,
    outside_layers,
    scale_block,
    scaled_layers,
    with_scaled_blocks,
)
from compressor.passes.prepare.groups import scale_map
from compressor.passes.prepare.planned import scalable, unscalable
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.proof import proved
from compressor.passes.prepare.scales import ScaleMap
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, skip_reasons
from compressor.types.layers import Scheme
from compressor.types.passes import (
    GraphPass,
    LayerOutcome,
    LayerRule,
    Outcome,
    PassContext,
    Survey,
)

_UNREACHED = "none of its channels can be scaled"


class Equalize(GraphPass):
    """Scale channels between layers; the network computes the same and is easier to quantize.

    A quantizer has one step for all channels of a value, and the largest channel sets it. If one
    layer's output reaches others through operators that commute with positive factors (ReLU and its
    kind, pooling, residual sums), the pass divides its channels by factors and multiplies the
    weights that read them by the same. Factors are chosen by the predicted rounding error, and
    applied only if they lower it. `quantize-static` does this by itself, for its own bits; put this
    pass before others that quantize.
    """

    name: ClassVar[str] = "equalize"
    version: ClassVar[int] = 5
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.WEIGHTS, Capability.GRAPH, Capability.RUN}
    )
    source: ClassVar[str] = "Nagel et al. 2019 (arXiv:1906.04721) section 4.1"

    weight_bits: Literal[8, 4, 3, 2] = Field(
        default=8, description="bits that a later pass quantizes weights to"
    )
    activation_bits: Literal[8, 4] = Field(
        default=8, description="bits that a later pass quantizes activations to"
    )
    granularity: Literal["channel", "tensor"] = Field(
        default="channel",
        description="whether weights will have one scale per row or one per tensor",
    )
    layers: tuple[LayerRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers whose channels can be scaled, and ask how large their values are."""
        scales, kept = self._scales(carrier), skip_reasons(self.layers, carrier.layers())
        rounding = self._rounding(scales)
        planned = scalable(scales, rounding)
        reasons = {}
        for layer in carrier.layers():
            why = unscalable(scales, layer)
            unreached = _UNREACHED + (f": {why}" if why else "")
            here = layer.name in planned
            reasons[layer.name] = kept[layer.name] or ("" if here else unreached)
        actions = {name: f"scale {part.channels}" for name, part in planned.items()}
        rows = plan_layers(self.name, actions, reasons)
        rows = tuple(
            replace(row, remark=planned[row.name].how) if row.touched else row for row in rows
        )
        return Survey(rows, span_requests(scales, rounding))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Scale the channels whose predicted error falls."""
        scales = self._scales(carrier)
        scaled = balance(carrier, scales, self._rounding(scales), statistics)
        after, scaled = proved(carrier, scaled, context.samples)
        if not scaled.groups:
            return Outcome(carrier, notes=scaled.notes)
        written = {w.layer.name for s in scaled.groups for w in s.group.writes}
        outcomes = []
        for layer in carrier.layers():
            gain = scaled.gains.get(layer.name)
            if gain is not None or layer.name in written:
                outcomes.append(LayerOutcome(layer.name, layer.dtype, None, _gained(gain)))
        return Outcome(after, tuple(outcomes), scaled.notes, rescale=scaled.rescale)

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model as it is: nothing becomes larger or smaller."""
        return carrier

    def _scales(self, carrier: Carrier) -> ScaleMap:
        return scale_map(carrier.graph(), self._parameters(carrier))

    def _parameters(self, carrier: Carrier) -> frozenset[str]:
        """Return the names of what may be changed."""
        kept = skip_reasons(self.layers, carrier.layers())
        weights = {layer.weight for layer in carrier.layers() if kept[layer.name]}
        return frozenset(carrier.tensors()) - weights

    def _rounding(self, scales: ScaleMap) -> Rounding:
        """Return what would be quantized: what layers and residual sums read, and all weights."""
        scheme = Scheme(self.weight_bits, granularity=self.granularity)
        read = [value for step in scales.steps for value in step.inputs if step.reads]
        weights = {step.layer.name: scheme for step in scales.steps if step.layer is not None}
        return Rounding(dict.fromkeys(read, (2**self.activation_bits - 1, False)), weights)


class Smooth(Equalize):
    """Scale channels in front of products of matrices; encoders are easier to quantize then.

    A few channels of a transformer's activations are many times as large as the others. The pass
    divides them by factors and multiplies the weights that read them by the same. The division goes
    into the norm or layer that writes the channels. If something else reads them too, a `Mul` in
    front of the layer divides them, if the predicted error falls by two decibels. That error
    chooses the factors of each input. `quantize-static` does this by itself, for its own bits. The
    pass also takes the checkpoint of a causal language model: put it before `quantize-weights` with
    `activations`.
    """

    name: ClassVar[str] = "smooth"
    source: ClassVar[str] = "Xiao et al. 2022 (arXiv:2211.10438) section 4"

    def _scales(self, carrier: Carrier) -> ScaleMap:
        names = [layer.name for layer in carrier.layers() if layer.is_linear]
        empty = ScaleMap((), (), {}, "it is not the weight of a product of matrices")
        return with_product_groups(empty, carrier.graph(), names, self._parameters(carrier))

    @property
    def in_blocks(self) -> bool:
        """Whether the checkpoint of a causal language model is taken, block by block."""
        return True

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers whose channels can be scaled, and ask how large their values are."""
        if not isinstance(carrier, BlockCheckpoint):
            return super().survey(carrier, context)
        blocks, kept = self._blocks(carrier), skip_reasons(self.layers, carrier.layers())
        reached = outside_layers(carrier, blocks)
        reasons = {
            layer.name: kept[layer.name] or ("" if layer.name in reached else _UNREACHED)
            for layer in carrier.layers()
        }
        rows = plan_layers(self.name, dict.fromkeys(reached, "scale channels"), reasons)
        requests = {r.key: r for block in blocks for r in block.requests.values()}
        return Survey(rows, tuple(requests.values()))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Scale the channels whose predicted error falls."""
        if not isinstance(carrier, BlockCheckpoint):
            return super().apply(carrier, context, statistics)
        scaled, gains = {}, dict[str, float | None]()
        found = dict[str, Any]()
        for stage in context.blocks or ():
            found.update(stage.statistics)
        for block in self._blocks(carrier):
            groups = scale_block(carrier, block, found)
            scaled[block.path] = (block, groups)
            gains.update(scaled_layers(block, groups))
        outcomes = [
            LayerOutcome(x.name, x.dtype, None, _gained(gains[x.name]))
            for x in carrier.layers()
            if x.name in gains
        ]
        every = tuple(one for _, groups in scaled.values() for one in groups)
        notes = Balance({}, every, {}).notes
        return Outcome(with_scaled_blocks(carrier, scaled), tuple(outcomes), notes)

    def _blocks(self, carrier: BlockCheckpoint) -> tuple[BlockScales, ...]:
        return block_scales(carrier, self._parameters(carrier), self._rounding)


def _gained(gain: float | None) -> dict[str, float]:
    return {} if gain is None else {"equalized_db": gain}
