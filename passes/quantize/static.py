"""``quantize-static``: calibrated integer weights and activations as Q/DQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.graph.values import constant_of, value_by_name
from compressor.names import resolve_rules
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.observer import Range, Request
from compressor.types.passes import (
    LayerOutcome,
    LayerPlan,
    Outcome,
    Pass,
    PassContext,
    Survey,
)
from compressor.types.quantized import QuantizedTensor, Scheme
from passes.quantize.affine import (
    absmax_parameters,
    activation_parameters,
    mse_parameters,
    quantize,
    sqnr_db,
)
from passes.quantize.bias import attach_bias_codes, least_weight_scale
from passes.quantize.gptq import gptq
from passes.quantize.placement import Placement, activation_input, place
from passes.quantize.profiles import Profile, profile_for
from passes.quantize.qdq import ActivationCode, insert_activation_codes
from passes.quantize.static_options import ActivationOptions, StaticRule, WeightOptions
from passes.quantize.weights import attach_codes, write_out_zero_point

_DTYPES = {
    (8, True): ir.DataType.INT8,
    (8, False): ir.DataType.UINT8,
    (4, True): ir.DataType.INT4,
    (4, False): ir.DataType.UINT4,
}
_MOST_COLUMNS = 5000  # a second moment of more columns takes over 100 MB


class QuantizeStatic(Pass):
    """Quantize weights and activations to integers with ranges from calibration data.

    QuantizeLinear and DequantizeLinear are put where the exports' target fuses them into integer
    kernels; weights are stored as integer codes. Activation ranges come from observers, weights
    are rounded so that the layer's output changes least.
    """

    name: ClassVar[str] = "quantize-static"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH, Capability.RUN})
    source: ClassVar[str] = (
        "Jacob et al. 2017 (arXiv:1712.05877) sections 2 and 3; "
        "Frantar et al. 2022 (arXiv:2210.17323) for rounding"
    )

    weights: WeightOptions = Field(default_factory=WeightOptions, description="weights")
    activations: ActivationOptions = Field(
        default_factory=ActivationOptions, description="activations"
    )
    layers: tuple[StaticRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers, and ask for ranges and second moments."""
        self._check_percentile()
        model = carrier.graph()
        profile = profile_for(context.targets)
        self._check_symmetry(profile)
        schemes, reasons = self._schemes(carrier.layers(), model, profile)
        placement = place(model, profile, schemes)
        placed = {layer.name for layer, _ in placement.layers}
        if not placed:
            raise SpecError(
                "quantize-static",
                f"finds no layer to quantize among {len(carrier.layers())}",
                "look at the rules; layers inside If and Loop stay in floating point",
            )
        shown = str(_DTYPES[self.activations.bits, self._symmetric(profile)]).lower()
        rows = [
            LayerPlan(layer.name, f"{schemes[layer.name]} x {shown}")
            if layer.name in placed
            else LayerPlan(
                layer.name, "keep", reasons.get(layer.name, "no float activation"), touched=False
            )
            for layer in carrier.layers()
        ]
        return Survey(
            tuple(rows), self._requests(model, placement, profile), self._notes(context, profile)
        )

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Quantize the chosen layers."""
        graph, weights = self._quantized(carrier, context, statistics)
        outcomes = []
        for layer in carrier.layers():
            if layer.name in weights:
                before = layer.canonical(carrier.weight(layer)).to(torch.float32)
                after = weights[layer.name]()
                outcomes.append(
                    LayerOutcome(layer.name, str(after.scheme), sqnr_db(before, after.dequantize()))
                )
        return Outcome(carrier.with_graph(graph), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier, context, statistics)[0])

    def _quantized(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> tuple[ir.Model, dict[str, Callable[[], QuantizedTensor]]]:
        model = carrier.graph().clone()
        profile = profile_for(context.targets)
        schemes, _ = self._schemes(carrier.layers(), model, profile)
        placement = place(model, profile, schemes)
        codes = {
            name: self._activation_code(
                statistics[self._range_request(name, placement, profile).key], profile
            )
            for name in placement.values
        }
        roots = _roots(model, placement)
        weights: dict[str, Callable[[], QuantizedTensor]] = {}
        nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
        for layer, value in placement.layers:
            if layer.name in weights:
                continue
            node = nodes[layer.name]
            bias = _own_bias(node) if profile.integer_bias else None
            input_scale = codes[roots[value]].scale
            request = self._moment_request(layer, node)
            moment = None if request is None else statistics[request.key]
            make = self._weight(carrier, layer, schemes[layer.name], (moment, bias, input_scale))
            weights[layer.name] = make
            stored = attach_codes(model, layer, schemes[layer.name], make)
            if layer.kind in profile.explicit_zero and stored.zero_point is None:
                write_out_zero_point(model.graph, stored)
            if bias is not None:
                value_codes = attach_bias_codes(model.graph, bias, input_scale, make)
                node.replace_input_with(2, value_codes)
        insert_activation_codes(model, placement, codes)
        return model, weights

    def _weight(
        self,
        carrier: Carrier,
        layer: Layer,
        scheme: Scheme,
        surroundings: tuple[torch.Tensor | None, ir.Value | None, float],
    ) -> Callable[[], QuantizedTensor]:
        """Return a function that quantizes the layer's weight, once, when it is asked."""
        moment, bias, input_scale = surroundings
        tensor = None if bias is None else bias.const_value

        @cache
        def make() -> QuantizedTensor:
            matrix = layer.canonical(carrier.weight(layer)).to(torch.float32)
            parameters = mse_parameters if self.weights.range == "mse" else absmax_parameters
            scale, zero = parameters(matrix, scheme)
            if tensor is not None:
                least = least_weight_scale(np.asarray(tensor.numpy()), input_scale)
                least = least.amax(0, keepdim=True) if scale.shape[0] == 1 else least
                scale = torch.maximum(scale, least)
            if moment is None:
                return quantize(matrix, scale, zero, scheme)
            return _rounded(matrix, moment, scale, zero, scheme)

        return make

    def _schemes(
        self, layers: Sequence[Layer], model: ir.Model, profile: Profile
    ) -> tuple[dict[str, Scheme], dict[str, str]]:
        """Return the scheme of each layer to quantize, and why the others are kept."""
        rules = resolve_rules(self.layers, [layer.name for layer in layers])
        nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
        schemes: dict[str, Scheme] = {}
        reasons: dict[str, str] = {}
        for layer in layers:
            rule = rules[layer.name]
            reason = (
                "skipped by a rule" if rule and rule.skip else _kept(nodes[layer.name], profile)
            )
            if reason:
                reasons[layer.name] = reason
                continue
            granularity = (rule and rule.granularity) or self.weights.granularity
            if layer.kind == "ConvTranspose" and layer.groups > 1:
                granularity = "tensor"
            schemes[layer.name] = Scheme(
                bits=(rule and rule.bits) or self.weights.bits,
                symmetric=self.weights.symmetric,
                granularity=granularity,
            )
        return schemes, reasons

    def _requests(
        self, model: ir.Model, placement: Placement, profile: Profile
    ) -> tuple[Request, ...]:
        found = {}
        for name in placement.values:
            request = self._range_request(name, placement, profile)
            found[request.key] = request
        nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
        for layer, _ in placement.layers:
            moment = self._moment_request(layer, nodes[layer.name])
            if moment is not None:
                found[moment.key] = moment
        return tuple(found.values())

    def _range_request(self, value: str, placement: Placement, profile: Profile) -> Request:
        options: dict[str, Any] = {
            "bits": self.activations.bits,
            "symmetric": self._symmetric(profile),
        }
        if self.activations.percentile is not None:
            options["percentile"] = self.activations.percentile
        gate = placement.gates.get(value)
        return Request(value, self.activations.observer, options, gate)

    def _moment_request(self, layer: Layer, node: ir.Node) -> Request | None:
        if self.weights.rounding != "gptq" or layer.columns > _MOST_COLUMNS:
            return None
        value = activation_input(node)
        if value is None or not value.name:
            return None
        if layer.kind in ("Gemm", "MatMul"):
            return Request(value.name, "second-moment")
        options = _window(layer, node)
        return None if options is None else Request(value.name, "second-moment", options)

    def _activation_code(self, found: Range, profile: Profile) -> ActivationCode:
        symmetric = self._symmetric(profile)
        bits = self.activations.bits
        scale, zero = activation_parameters(found, bits, symmetric, symmetric)
        return ActivationCode(scale, zero, _DTYPES[bits, symmetric])

    def _symmetric(self, profile: Profile) -> bool:
        given = self.activations.symmetric
        return not profile.unsigned if given == "auto" else given

    def _check_symmetry(self, profile: Profile) -> None:
        if not profile.unsigned and not self._symmetric(profile):
            raise SpecError(
                "activations.symmetric",
                "is false, and target tensorrt takes zero point 0 only",
                "leave it out, or set it to true",
            )
        if not profile.unsigned and not self.weights.symmetric:
            raise SpecError(
                "weights.symmetric",
                "is false, and target tensorrt takes zero point 0 only",
                "leave it out, or set it to true",
            )

    def _check_percentile(self) -> None:
        if self.activations.percentile is not None and self.activations.observer != "percentile":
            raise SpecError(
                "activations.percentile",
                f"is given, and the observer is {self.activations.observer}",
                "set observer: percentile, or leave it out",
            )

    def _notes(self, context: PassContext, profile: Profile) -> tuple[str, ...]:
        notes = []
        if "ort-cpu" in context.targets and self._symmetric(profile):
            notes.append(
                "symmetric int8 activations run slower than uint8 in ONNX Runtime on most CPUs"
            )
        if "ort-cpu" in context.targets and 4 in (self.weights.bits, self.activations.bits):
            notes.append(
                "ONNX Runtime's CPU provider has no 4-bit integer kernels: smaller, not faster"
            )
        return tuple(notes)


def _kept(node: ir.Node, profile: Profile) -> str:
    """Say why a layer stays in floating point; empty if it need not."""
    if node.op_type not in profile.layers:
        table = node.op_type == "Gather"
        return profile.kept.get(
            node.op_type, "a table is looked up, not multiplied" if table else "no integer kernel"
        )
    if node.op_type == "Gemm":
        plain = (
            node.attributes.get_float("alpha", 1.0) == 1.0
            and node.attributes.get_float("beta", 1.0) == 1.0
            and node.attributes.get_int("transA", 0) == 0
        )
        if not plain:
            return "its alpha, beta or transA has no integer kernel"
    weight = node.inputs[1]
    if weight is None or constant_of(weight) is None or not _read_as_weight(weight):
        return "its weight is computed or has other readers"
    return ""


def _read_as_weight(weight: ir.Value) -> bool:
    return all(use.idx == 1 for use in weight.uses()) and not weight.is_graph_output()


def _own_bias(node: ir.Node) -> ir.Value | None:
    """Return the node's bias if it is a vector that nothing else reads."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None or not bias.is_initializer() or len(list(bias.uses())) != 1:
        return None
    shape = bias.shape
    if shape is None or len(shape) != 1 or bias.dtype != ir.DataType.FLOAT:
        return None
    return bias


def _window(layer: Layer, node: ir.Node) -> dict[str, Any] | None:
    """Describe a 2-D convolution's patches; ``None`` for others."""
    if layer.kind != "Conv" or len(layer.shape) != 4:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    return {
        "kernel": tuple(layer.shape[2:]),
        "strides": tuple(node.attributes.get_ints("strides", (1, 1))),
        "pads": tuple(node.attributes.get_ints("pads", (0, 0, 0, 0))),
        "dilations": tuple(node.attributes.get_ints("dilations", (1, 1))),
        "groups": layer.groups,
    }


def _roots(model: ir.Model, placement: Placement) -> dict[str, str]:
    """Map each layer's input to the quantized value whose codes it carries."""
    values = value_by_name(model)
    wanted = set(placement.values)
    found: dict[str, str] = {}
    for _, name in placement.layers:
        value: ir.Value | None = values[name]
        while value is not None and value.name not in wanted:
            node = value.producer()
            value = None if node is None else node.inputs[0]
        if value is not None and value.name:
            found[name] = value.name
    return found


def _rounded(
    matrix: torch.Tensor,
    moment: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: Scheme,
) -> QuantizedTensor:
    """Round with GPTQ, the rows of each channel group by the moment of the group's inputs."""
    groups = moment.shape[0]
    rows = matrix.shape[0] // groups
    shared = scale.shape[0] == 1
    codes = []
    for index in range(groups):
        own = slice(index * rows, (index + 1) * rows)
        part = slice(None) if shared else own
        codes.append(gptq(matrix[own], moment[index], scale[part], zero[part], scheme).codes)
    return QuantizedTensor(torch.cat(codes), scale, zero, scheme)
