"""``quantize-static``: calibrated integer weights and activations as Q/DQ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.codes import attach_codes, write_out_zero_point
from compressor.graph.layers import layers_with_nodes
from compressor.graph.values import constant_of, value_by_name
from compressor.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.observer import Moments, Range, Request
from compressor.types.passes import (
    LayerOutcome,
    Outcome,
    Pass,
    PassContext,
    Survey,
)
from compressor.types.quantized import QuantizedTensor, Scheme
from passes.quantize.affine import activation_parameters, sqnr_db
from passes.quantize.bias import attach_bias_codes, least_weight_scale
from passes.quantize.input_moments import moment_request
from passes.quantize.pixels import (
    PixelInput,
    common_code,
    level_moments,
    pixel_inputs,
    read_pixels,
)
from passes.quantize.placement import Placement, place
from passes.quantize.profiles import Profile, profile_for
from passes.quantize.qdq import ActivationCode, insert_activation_codes
from passes.quantize.static_options import ActivationOptions, StaticRule, WeightOptions
from passes.quantize.static_weights import WeightJob

_Pair: TypeAlias = tuple[Callable[[], torch.Tensor], Callable[[], QuantizedTensor]]
_MOST_COLUMNS = 5000  # a second moment of more columns takes over 100 MB


class QuantizeStatic(Pass):
    """Quantize weights and activations to integers with ranges from calibration data.

    QuantizeLinear and DequantizeLinear are put where the exports' target fuses them into integer
    kernels; weights are stored as integer codes. Activation ranges come from observers, weights
    are rounded so that the layer's output changes least.
    """

    name: ClassVar[str] = "quantize-static"
    version: ClassVar[int] = 2
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
        sign = "int" if self._symmetric(profile) else "uint"
        shown = f"{sign}{self.activations.bits}"
        actions = {name: f"{scheme} x {shown}" for name, scheme in schemes.items()}
        kept = {
            layer.name: ""
            if layer.name in placed
            else reasons.get(layer.name, "it reads no float value of the main graph")
            for layer in carrier.layers()
        }
        rows = plan_layers(self.name, actions, kept)
        requests = self._requests(model, placement, profile)
        return Survey(rows, requests, self._notes(context, profile))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Quantize the chosen layers."""
        graph, weights = self._quantized(carrier, context, statistics)
        outcomes = []
        for layer in carrier.layers():
            if layer.name in weights:
                before, quantized = weights[layer.name]
                after = quantized()
                loss = sqnr_db(before(), after.dequantize())
                outcomes.append(LayerOutcome(layer.name, str(after.scheme), loss))
        return Outcome(carrier.with_graph(graph), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier, context, statistics)[0])

    def _quantized(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> tuple[ir.Model, dict[str, _Pair]]:
        """Return the quantized graph, and each weight before and after, computed when asked."""
        model = carrier.graph().clone()
        profile = profile_for(context.targets)
        schemes, _ = self._schemes(carrier.layers(), model, profile)
        moments = self._moments(model, schemes, statistics)
        codes = self._pixel_codes(model, profile, schemes, statistics, moments)
        placement = place(model, profile, schemes)
        for name in placement.values:
            if name not in codes:
                request = self._range_request(name, placement, profile)
                codes[name] = self._activation_code(statistics[request.key], profile)
        jobs: dict[str, WeightJob] = {}
        makers: dict[str, Callable[[], QuantizedTensor]] = {}
        roots = _roots(model, placement)
        nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
        for layer, value in placement.layers:
            if layer.name in jobs:
                continue
            node = nodes[layer.name]
            bias = _own_bias(node) if profile.integer_bias else None
            input_scale = codes[roots[value]].scale
            jobs[layer.name] = WeightJob(
                layer,
                schemes[layer.name],
                _reader(model.graph.initializers[layer.weight]),
                moments.get(layer.name),
                None if bias is None else least_weight_scale(bias, input_scale),
            )
            make = makers[layer.name] = jobs[layer.name].maker(self.weights)
            stored = attach_codes(model, layer, schemes[layer.name], make)
            if layer.kind in profile.explicit_zero and stored.zero_point is None:
                write_out_zero_point(model.graph, stored)
            if bias is not None:
                node.replace_input_with(2, attach_bias_codes(model.graph, bias, input_scale, make))
        insert_activation_codes(model, placement, codes)
        return model, {name: (job.matrix, makers[name]) for name, job in jobs.items()}

    def _moments(
        self, model: ir.Model, chosen: Collection[str], statistics: Mapping[str, Any]
    ) -> dict[str, Moments]:
        """Return the moments of the chosen layers' inputs, where they were asked for."""
        found: dict[str, Moments] = {}
        for layer, node in layers_with_nodes(model):
            request = self._moment_request(layer, node) if layer.name in chosen else None
            moments = None if request is None else statistics.get(request.key)
            if moments is not None:
                found.setdefault(layer.name, moments)
        return found

    def _pixel_codes(
        self,
        model: ir.Model,
        profile: Profile,
        chosen: Collection[str],
        statistics: Mapping[str, Any],
        moments: dict[str, Moments],
    ) -> dict[str, ActivationCode]:
        """Give inputs that are images codes that are their pixels; change the graph if need be."""
        signed = self._symmetric(profile)
        codes: dict[str, ActivationCode] = {}
        for pixel in self._pixel_inputs(model, chosen):
            grid = statistics[_grid_request(pixel).key]
            if grid is None:
                continue
            common = None if signed else common_code(grid)
            if common is not None:
                codes[pixel.value] = ActivationCode(*common, _code_type(signed))
                continue
            name, used = read_pixels(model, pixel, grid, signed=signed)
            codes[name] = ActivationCode(1.0, 0, _code_type(signed))
            if pixel.layer.name in moments:
                moments[pixel.layer.name] = level_moments(moments[pixel.layer.name], used)
        return codes

    def _pixel_inputs(self, model: ir.Model, chosen: Collection[str]) -> list[PixelInput]:
        if not self.activations.exact_pixels or self.activations.bits != 8:
            return []
        return [p for p in pixel_inputs(model) if p.layer.name in chosen]

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
            reason = skip_reason(rule) or _kept(nodes[layer.name], profile)
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
        chosen = [layer.name for layer, _ in placement.layers]
        for layer, _ in placement.layers:
            moment = self._moment_request(layer, nodes[layer.name])
            if moment is not None:
                found[moment.key] = moment
        for pixel in self._pixel_inputs(model, chosen):
            grid = _grid_request(pixel)
            found[grid.key] = grid
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
        return moment_request(layer, node)

    def _activation_code(self, found: Range, profile: Profile) -> ActivationCode:
        symmetric = self._symmetric(profile)
        bits = self.activations.bits
        scale, zero = activation_parameters(found, bits, symmetric, symmetric)
        dtype = _code_type(symmetric)
        if bits == 8:
            return ActivationCode(scale, zero, dtype)
        scheme = Scheme(bits, symmetric, symmetric, "tensor")
        limits = ((scheme.low - zero) * scale, (scheme.high - zero) * scale)
        return ActivationCode(scale, zero, dtype, limits)

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


def _grid_request(pixel: PixelInput) -> Request:
    return Request(pixel.value, "channel-grid")


def _code_type(signed: bool) -> ir.DataType:
    return ir.DataType.INT8 if signed else ir.DataType.UINT8


def _reader(value: ir.Value) -> Callable[[], torch.Tensor]:
    """Return a function that reads an initializer as it is now, whatever becomes of the value."""
    tensor = value.const_value
    assert tensor is not None
    return lambda: torch.from_numpy(np.array(tensor.numpy()))
