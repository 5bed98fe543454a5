"""From fake quantization to the graph that ``quantize-static`` would have made, with integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from compressor.models.element_types import tensor_of
from compressor.models.executor import GraphModule
from compressor.models.torch.lowering import NamedModule
from compressor.passes.quantize.maths.affine import code_dtype, quantize
from compressor.passes.quantize.static.settings import StaticSettings
from compressor.passes.quantize.static.writing import LeastScale, widened, write_static_codes
from compressor.passes.train.job import PREFIX, Regulator
from compressor.passes.train.qat.graph import FROZEN, FakeQuantized, ScaleNames, current_scale
from compressor.passes.train.qat.networks import (
    ActivationPoint,
    Networks,
    Points,
    WeightPoint,
    folding_factor,
    refolded,
)
from compressor.types.layers import Layer, QuantizedTensor, sqnr_db
from compressor.types.passes import LayerOutcome

_MOST_CHANGE = 0.01  # share by which a scale may change in a step
_FARTHEST = 64.0  # times smaller or larger than at the beginning: positive, and far from overflow


@dataclass(frozen=True)
class Prepared:
    """A network with fake quantization, ready for training.

    The module is trained, and its part ``graph`` executes the graph; statistics are those of the
    activations.
    """

    module: NamedModule
    graph: GraphModule
    networks: Networks
    points: Points
    quantized: FakeQuantized
    settings: StaticSettings
    statistics: Mapping[str, Any]

    def written(self, tensors: Mapping[str, Tensor]) -> tuple[ir.Model, tuple[LayerOutcome, ...]]:
        """Return the graph with the module's tensors as integer codes, and what was done."""
        trained = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        model = refolded(self.networks, trained)
        decision = self.settings.decide(model)
        codes: dict[str, QuantizedTensor] = {}
        outcomes = []
        for layer in decision.layers:
            if layer.is_recurrent:  # not trained
                continue
            point = self.points.weights.get(layer.name)
            if point is None:
                outcomes.append(LayerOutcome(layer.name, layer.dtype, details={"trained": True}))
                continue
            weight, factors = model.graph.initializers[layer.weight], point.column_factors()
            before = layer.canonical(tensor_of(weight)).to(torch.float32)
            if factors is not None:
                before = before * factors.to(torch.float32)
            scale, zero = self._weight_scale(point, trained)
            codes[layer.name] = after = quantize(before, scale, zero, point.scheme)
            loss = sqnr_db(before, after.dequantize())
            outcomes.append(LayerOutcome(layer.name, str(after.scheme), loss, {"trained": True}))
            # The values that the codes mean, from which pixels' biases are computed.
            values = after.dequantize().double()
            values = values if factors is None else values / factors
            array = layer.stored(values.to(torch.float32)).numpy()
            weight.const_value = ir.tensor(array, name=layer.weight)
        schemes = {name: point.scheme for name, point in self.points.weights.items()}
        decision, value_codes = replace(decision, schemes=schemes).with_pixels(self.statistics, {})
        for name, names in self.quantized.activations.items():
            activation = self.points.activations[name]
            scale, zero = current_scale(names, activation.scheme, trained)
            if name not in value_codes:
                value_codes[name] = self.settings.code(
                    float(scale), int(zero), activation.scheme.bits
                )

        def make_codes(layer: Layer, least: LeastScale) -> Callable[[], QuantizedTensor]:
            return lambda: widened(codes[layer.name], least)

        write_static_codes(decision, value_codes, make_codes)
        return model, tuple(outcomes)

    def _weight_scale(
        self, point: WeightPoint, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        names, scheme = self.quantized.weights[point.layer.name], point.scheme
        scale, zero = current_scale(names, scheme, tensors)
        if point.norm is not None and point.scales_folded:
            norm = next(node for node in self.networks.trained.graph if node.name == point.norm)
            scale = (scale.double() * folding_factor(norm, tensors).abs()).float()
        form = point.scale.shape
        return scale.reshape(form), zero.to(code_dtype(scheme)).reshape(form)


class ScalesInRange(Regulator):
    """Keeps scales positive and from jumping, and zero points among the codes.

    A scale's gradient is a sum of terms of both signs; if a channel's weights are small, or codes
    are many, one step of gradient descent may be several times the scale itself.
    """

    def __init__(
        self,
        module: nn.Module,
        quantized: FakeQuantized,
        activations: Mapping[str, ActivationPoint],
    ):
        parameters = dict(module.named_parameters())
        names: list[ScaleNames] = [*quantized.weights.values(), *quantized.activations.values()]
        self._sizes = [parameters[PREFIX + n.size] for n in names if n.size in quantized.trained]
        self._before: list[Tensor] = []
        self._offsets = []
        for value, scale in quantized.activations.items():
            if scale.offset is not None:
                zero, scheme = activations[value].zero_point, activations[value].scheme
                steps = scheme.high - scheme.low
                least, most = (scheme.low - zero) / steps, (scheme.high - zero) / steps
                self._offsets.append((parameters[PREFIX + scale.offset], least, most))

    def before(self, step: int) -> None:
        """Remember the scales."""
        self._before = [size.detach().clone() for size in self._sizes]

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Clamp what a step has moved too far."""
        for size, old in zip(self._sizes, self._before, strict=True):
            least, most = old * (1 - _MOST_CHANGE), old * (1 + _MOST_CHANGE)
            size.clamp_(least, most).clamp_(1 / _FARTHEST, _FARTHEST)
        for offset, lowest, highest in self._offsets:
            offset.clamp_(lowest, highest)


class NormsFrozen(Regulator):
    """Lets batch norms use their running statistics from a step on.

    R. Krishnamoorthi, Quantizing deep convolutional networks for efficient inference, 2018
    (arXiv:1806.08342), section 3.2.2.
    """

    def __init__(self, graph: GraphModule, first: int):
        self._graph = graph
        self._first = first

    def before(self, step: int) -> None:
        """Set whether this step's norms are frozen."""
        self._graph.get_buffer(FROZEN).fill_(step >= self._first)
