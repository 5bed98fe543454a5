"""From a trained network to the graph that ``quantize-static`` would have made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from compressor.graph.layers import graph_layers
from compressor.models.executor import GraphModule, from_numpy
from compressor.passes.quantize.maths.affine import code_dtype, quantize
from compressor.passes.quantize.static.graph import LeastScale, StaticCodes, write_static_codes
from compressor.passes.quantize.static.placement import place
from compressor.passes.quantize.static.settings import StaticSettings
from compressor.passes.train.preparing import PREFIX
from compressor.passes.train.qat.graph import FROZEN, FakeQuantized, ScaleNames, current_scale
from compressor.passes.train.qat.networks import Networks, folding_factor, refolded
from compressor.passes.train.qat.points import ActivationPoint, Points, WeightPoint
from compressor.types.layers import Layer
from compressor.types.matrices import sqnr_db
from compressor.types.passes import LayerOutcome
from compressor.types.quantized import QuantizedTensor


def written(
    networks: Networks,
    points: Points,
    quantized: FakeQuantized,
    settings: StaticSettings,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, Any],
) -> tuple[ir.Model, tuple[LayerOutcome, ...]]:
    """Return the graph with integer codes, and what was done to each layer.

    Args:
        networks: what was trained.
        points: what is quantized.
        quantized: names the trained scales.
        settings: what to quantize, and how.
        tensors: what training returned, by the names of the trained graph's initializers.
        statistics: as they were when training began.
    """
    model = refolded(networks, tensors)
    codes: dict[str, QuantizedTensor] = {}
    outcomes = []
    for layer in graph_layers(model):
        point = points.weights.get(layer.name)
        if point is None:
            outcomes.append(LayerOutcome(layer.name, layer.dtype, details={"trained": True}))
            continue
        before = _stored_matrix(model, layer, point)
        scale, zero = _weight_scale(networks, point, quantized, tensors)
        codes[layer.name] = after = quantize(before, scale, zero, point.scheme)
        loss = sqnr_db(before, after.dequantize())
        outcomes.append(LayerOutcome(layer.name, str(after.scheme), loss, {"trained": True}))
        _set_values(model, layer, point, after)
    schemes = {name: point.scheme for name, point in points.weights.items()}
    known = settings.pixel_codes(model, schemes, statistics, {})
    for name, names in quantized.activations.items():
        own = points.activations[name]
        scale, zero = current_scale(names, (own.low, own.high), tensors)
        if name not in known:
            known[name] = settings.code(float(scale), int(zero), own.bits)
    placement = place(model, settings.profile, schemes)
    static = StaticCodes(placement, schemes, known)

    def make_codes(layer: Layer, least: LeastScale) -> Callable[[], QuantizedTensor]:
        return lambda: _fitting(codes[layer.name], least)

    write_static_codes(model, settings.profile, static, make_codes)
    return model, tuple(outcomes)


def _stored_matrix(model: ir.Model, layer: Layer, point: WeightPoint) -> Tensor:
    """Return a weight as it will be stored, float32 ``[rows, columns]``."""
    tensor = model.graph.initializers[layer.weight].const_value
    assert tensor is not None
    matrix = layer.canonical(from_numpy(tensor)).to(torch.float32)
    factors = point.column_factors()
    return matrix if factors is None else matrix * factors.to(torch.float32)


def _weight_scale(
    networks: Networks,
    point: WeightPoint,
    quantized: FakeQuantized,
    tensors: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of a weight as it will be stored."""
    names, scheme = quantized.weights[point.layer.name], point.scheme
    scale, zero = current_scale(names, (scheme.low, scheme.high), tensors)
    if point.norm is not None and point.scales_folded:
        norm = next(node for node in networks.trained.graph if node.name == point.norm)
        scale = (scale.double() * folding_factor(norm, tensors).abs()).float()
    form = point.scale.shape
    return scale.reshape(form), zero.to(code_dtype(scheme)).reshape(form)


def _set_values(model: ir.Model, layer: Layer, point: WeightPoint, codes: QuantizedTensor) -> None:
    """Give the graph the values that the codes mean, from which pixels' biases are computed."""
    values, factors = codes.dequantize().double(), point.column_factors()
    if factors is not None:
        values = values / factors
    array = layer.stored(values.to(torch.float32)).numpy()
    model.graph.initializers[layer.weight].const_value = ir.tensor(array, name=layer.weight)


def _fitting(codes: QuantizedTensor, least: LeastScale) -> QuantizedTensor:
    """Return codes whose scales are large enough for the layer's integer bias."""
    if least is None:
        return codes
    needed = least()
    needed = needed.amax(0, keepdim=True) if codes.scale.shape[0] == 1 else needed
    if bool((codes.scale >= needed).all()):
        return codes
    wider = torch.maximum(codes.scale, needed)
    return quantize(codes.dequantize(), wider, codes.zero_point, codes.scheme)


_MOST_CHANGE = 0.01  # share by which a scale may change in a step
_FARTHEST = 64.0  # times smaller or larger than at the beginning: positive, and far from overflow


class ScalesInRange:
    """Keeps scales positive and from jumping, and zero points among the codes.

    A scale's gradient is a sum with many signs, and where a channel's weights are small, or codes
    are many, one step of gradient descent may be several times the scale itself.

    Args:
        module: what is trained.
        quantized: names its scales.
        activations: by the value's name.
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
        for value, own in quantized.activations.items():
            if own.offset is not None:
                point = activations[value]
                steps = point.high - point.low
                least = (point.low - point.zero_point) / steps
                most = (point.high - point.zero_point) / steps
                self._offsets.append((parameters[PREFIX + own.offset], least, most))

    def before(self, step: int) -> None:  # noqa: ARG002
        """Keep the scales."""
        self._before = [size.detach().clone() for size in self._sizes]

    @torch.no_grad()
    def after(self, step: int) -> None:  # noqa: ARG002
        """Bring back what a step has moved too far."""
        for size, old in zip(self._sizes, self._before, strict=True):
            least, most = old * (1 - _MOST_CHANGE), old * (1 + _MOST_CHANGE)
            size.clamp_(least, most).clamp_(1 / _FARTHEST, _FARTHEST)
        for offset, lowest, highest in self._offsets:
            offset.clamp_(lowest, highest)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


class NormsFrozen:
    """Lets batch norms use their running statistics from a step on.

    R. Krishnamoorthi, Quantizing deep convolutional networks for efficient inference, 2018
    (arXiv:1806.08342), section 3.2.2.

    Args:
        graph: the module that executes the graph.
        first: the step.
    """

    def __init__(self, graph: GraphModule, first: int):
        self._graph = graph
        self._first = first

    def before(self, step: int) -> None:
        """Say whether this step's norms are frozen."""
        self._graph.get_buffer(FROZEN).fill_(step >= self._first)

    def after(self, step: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the step says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""
