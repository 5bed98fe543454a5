"""From a trained network to the graph that ``quantize-static`` would have made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.layers import graph_layers
from compressor.models.executor import from_numpy
from compressor.passes.quantize.affine import code_dtype, quantize, sqnr_db
from compressor.passes.quantize.placement import place
from compressor.passes.quantize.static_graph import LeastScale, StaticCodes, write_static_codes
from compressor.passes.quantize.static_settings import StaticSettings
from compressor.passes.train.qat_graph import FakeQuantized, current_scale
from compressor.passes.train.qat_networks import Networks, folding_factor, refolded
from compressor.passes.train.qat_points import Points, WeightPoint
from compressor.types.layers import Layer
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
