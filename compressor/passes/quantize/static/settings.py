"""Options of ``quantize-static``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import onnx_ir as ir
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.code_forms import FLOATS
from compressor.graph.layers import layers_with_nodes
from compressor.graph.values import INTEGER_CODES, constant_of
from compressor.passes.quantize.maths.affine import activation_parameters
from compressor.passes.quantize.static.pixels import (
    PixelInput,
    common_code,
    level_moments,
    levels_of,
    pixel_inputs,
    read_pixels,
)
from compressor.passes.quantize.static.placement import Placement, Profile
from compressor.passes.quantize.static.qdq import ActivationCode
from compressor.types.layer_rules import resolve_rules, rule_of, skip_reason
from compressor.types.layers import Layer
from compressor.types.options import Options
from compressor.types.passes import LayerRule
from compressor.types.quantized import Scheme
from compressor.types.statistics import ChannelGrid, Moments, Range, Request

Bits = Literal[4, 8]


class WeightOptions(Options):
    """How weights are quantized."""

    bits: Bits = Field(default=8, description="width of a weight")
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale for each output channel, or one a tensor"
    )
    symmetric: bool = Field(default=True, description="zero point 0")
    range: Literal["min-max", "mse"] = Field(
        default="min-max", description="full range, or the one of least squared error"
    )
    rounding: Literal["gptq", "nearest"] = Field(
        default="gptq",
        description="gptq minds the layer's output: each weight's rounding error is made up for "
        "by the weights after it (arXiv:2210.17323)",
    )


class ActivationOptions(Options):
    """How activations are quantized."""

    bits: Bits = Field(default=8, description="width of an activation")
    observer: Literal[
        "mse", "min-max", "moving-average", "percentile", "entropy", "extreme-value"
    ] = Field(
        default="mse",
        description="how the range is chosen from the calibration data; extreme-value where large "
        "values carry the answer and calibration data are few, as with detectors",
    )
    symmetric: bool | Literal["auto"] = Field(
        default="auto",
        description="zero point 0; auto: only where an export's target demands it",
    )
    percentile: float | None = Field(
        default=None, gt=50, le=100, description="for observer percentile: share of values inside"
    )
    exact_pixels: bool = Field(
        default=True,
        description="where the input is normalized 8-bit images, let its codes be the pixels: "
        "no rounding; where channels are normalized differently, for three cheap operators",
    )


class StaticRule(LayerRule):
    """Per-layer settings of ``quantize-static``."""

    bits: Bits | None = Field(default=None, description="width of these layers' weights")
    granularity: Literal["channel", "tensor"] | None = Field(
        default=None, description="granularity of these layers' weights"
    )
    activation_bits: Bits | None = Field(
        default=None,
        description="width of what these layers read; where others read it, too, the widest counts",
    )


ALREADY = "it is quantized already"
"""Why a layer is kept whose weight is stored as codes."""

_BYTE = 8
_NARROW_FROM = 3  # bits: of two, the fourth code is worth more than products that cannot overflow


class WeightSettings(Protocol):
    """How weights are quantized, as far as a scheme says it."""

    @property
    def bits(self) -> int:
        """Width of a weight."""
        ...

    @property
    def granularity(self) -> Literal["channel", "tensor"]:
        """What has a scale of its own."""
        ...

    @property
    def symmetric(self) -> bool:
        """The zero point is 0."""
        ...


@dataclass(frozen=True)
class StaticSettings:
    """Options, with the rules of the target that they are for.

    Attributes:
        profile: the target's rules.
        weights: of all layers.
        activations: likewise.
        rules: for single layers; those that have ``bits`` and ``granularity`` change weights',
            those that have ``activation_bits`` what they read.
    """

    profile: Profile
    weights: WeightSettings
    activations: ActivationOptions
    rules: Sequence[LayerRule]

    @property
    def symmetric(self) -> bool:
        """Activations' zero points are 0, and their codes signed."""
        given = self.activations.symmetric
        return not self.profile.unsigned if given == "auto" else given

    def activation_type(self, layer: str) -> str:
        """What a layer's input becomes, for plans."""
        return f"{'int' if self.symmetric else 'uint'}{self.input_bits(layer)}"

    def activation_scheme(self, bits: int) -> Scheme:
        """What activations of a width become."""
        return Scheme(bits, self.symmetric, self.symmetric, "tensor")

    def input_bits(self, layer: str) -> int:
        """Return the width of what a layer reads, by its rule or that of all."""
        own: int | None = getattr(rule_of(self.rules, layer), "activation_bits", None)
        return own or self.activations.bits

    def value_bits(self, value: str, placement: Placement) -> int:
        """Return the width of a value: the widest of those that its readers want."""
        wanted = [self.input_bits(layer) for layer in placement.readers.get(value, ())]
        return max(wanted, default=self.activations.bits)

    def check(self) -> None:
        """Compare the options with each other and with the target.

        Raises:
            SpecError: they do not fit.
        """
        activations = self.activations
        if activations.percentile is not None and activations.observer != "percentile":
            raise SpecError(
                "activations.percentile",
                f"is given, and the observer is {activations.observer}",
                "set observer: percentile, or leave it out",
            )
        if self.profile.unsigned:
            return
        for key, symmetric in (
            ("activations.symmetric", self.symmetric),
            ("weights.symmetric", self.weights.symmetric),
        ):
            if not symmetric:
                raise SpecError(
                    key,
                    "is false, and target tensorrt takes zero point 0 only",
                    "leave it out, or set it to true",
                )

    def schemes(
        self, layers: Sequence[Layer], model: ir.Model
    ) -> tuple[dict[str, Scheme], dict[str, str]]:
        """Return the scheme of each layer to quantize, and why the others are kept.

        Raises:
            SpecError: a rule matches no layer.
        """
        rules = resolve_rules(self.rules, [layer.name for layer in layers])
        nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
        schemes: dict[str, Scheme] = {}
        reasons: dict[str, str] = {}
        for layer in layers:
            rule = rules[layer.name]
            reason = skip_reason(rule) or _kept(layer, nodes[layer.name], self.profile)
            if reason:
                reasons[layer.name] = reason
                continue
            granularity = getattr(rule, "granularity", None) or self.weights.granularity
            if layer.is_transposed_convolution and layer.groups > 1:
                granularity = "tensor"
            bits = getattr(rule, "bits", None) or self.weights.bits
            schemes[layer.name] = Scheme(
                bits=bits,
                symmetric=self.weights.symmetric,
                granularity=granularity,
                narrow=bits >= _NARROW_FROM,
            )
        return schemes, reasons

    def requests(self, model: ir.Model, placement: Placement) -> tuple[Request, ...]:
        """Return what has to be known of the activations."""
        found = {}
        for name in placement.values:
            request = self.range_request(name, placement)
            found[request.key] = request
        for pixel in self.pixel_inputs(model, [layer.name for layer, _ in placement.layers]):
            grid = _grid_request(pixel)
            found[grid.key] = grid
        return tuple(found.values())

    def range_request(self, value: str, placement: Placement) -> Request:
        """Ask for the range of a value."""
        options: dict[str, Any] = {
            "bits": self.value_bits(value, placement),
            "symmetric": self.symmetric,
        }
        if self.activations.percentile is not None:
            options["percentile"] = self.activations.percentile
        gate = placement.gates.get(value)
        return Request(value, self.activations.observer, options, gate)

    def activation_code(self, found: Range, bits: int) -> ActivationCode:
        """Return how a value of a range is quantized."""
        symmetric = self.symmetric
        scale, zero = activation_parameters(found, bits, symmetric, symmetric)
        return self.code(scale, zero, bits)

    def code(self, scale: float, zero: int, bits: int) -> ActivationCode:
        """Return how a value is quantized with a scale and a zero point."""
        scheme, dtype = self.activation_scheme(bits), _code_type(self.symmetric)
        if scheme.bits == _BYTE:
            return ActivationCode(scale, zero, dtype)
        limits = ((scheme.low - zero) * scale, (scheme.high - zero) * scale)
        return ActivationCode(scale, zero, dtype, limits)

    def codes(
        self,
        placement: Placement,
        known: Mapping[str, ActivationCode],
        statistics: Mapping[str, Any],
    ) -> dict[str, ActivationCode]:
        """Return how each placed value is quantized: as known already, or by its range."""
        found = dict(known)
        for name in placement.values:
            if name not in found:
                request = self.range_request(name, placement)
                bits = self.value_bits(name, placement)
                found[name] = self.activation_code(statistics[request.key], bits)
        return found

    def pixel_inputs(self, model: ir.Model, chosen: Collection[str]) -> list[PixelInput]:
        """Return the inputs that may be images whose pixels the codes can be."""
        if not self.activations.exact_pixels:
            return []
        return [
            pixel
            for pixel in pixel_inputs(model)
            if pixel.layer.name in chosen and self.input_bits(pixel.layer.name) == _BYTE
        ]

    def pixel_codes(
        self,
        model: ir.Model,
        chosen: Collection[str],
        statistics: Mapping[str, Any],
        moments: dict[str, Moments],
    ) -> dict[str, ActivationCode]:
        """Give inputs that are images codes that are their pixels; change the graph if need be.

        Args:
            model: changed in place.
            chosen: names of the layers that are quantized.
            statistics: the answers to :meth:`requests`.
            moments: of the layers' inputs; changed where a layer's input is.
        """
        codes: dict[str, ActivationCode] = {}
        for pixel in self.pixel_inputs(model, chosen):
            grid = statistics[_grid_request(pixel).key]
            if grid is None:
                continue
            common = None if self.symmetric else common_code(grid)
            if common is not None:
                codes[pixel.value] = ActivationCode(*common, _code_type(self.symmetric))
                continue
            name, used = read_pixels(model, pixel, grid, signed=self.symmetric)
            codes[name] = ActivationCode(1.0, 0, _code_type(self.symmetric))
            if pixel.layer.name in moments:
                moments[pixel.layer.name] = level_moments(moments[pixel.layer.name], used)
        return codes

    def pixel_grids(
        self, model: ir.Model, chosen: Collection[str], statistics: Mapping[str, Any]
    ) -> dict[str, ChannelGrid]:
        """Return the grids that :meth:`pixel_codes` folds into layers, by the layer's name."""
        found = {}
        for pixel in self.pixel_inputs(model, chosen):
            grid = statistics[_grid_request(pixel).key]
            if grid is not None and (self.symmetric or common_code(grid) is None):
                found[pixel.layer.name] = levels_of(grid, signed=self.symmetric)
        return found


def kernel_notes(targets: frozenset[str], settings: StaticSettings) -> tuple[str, ...]:
    """Say what a target is slow with."""
    notes = []
    if "ort-cpu" in targets and settings.symmetric:
        notes.append(
            "symmetric int8 activations run slower than uint8 in ONNX Runtime on most CPUs"
        )
    if "ort-cpu" in targets and min(settings.weights.bits, settings.activations.bits) < _BYTE:
        notes.append(
            "ONNX Runtime's CPU provider has no 4-bit integer kernels: smaller, not faster"
        )
    if "ort-cuda" in targets:
        notes.append(
            "ONNX Runtime's CUDA provider has no integer kernels for Q/DQ: smaller, not faster; "
            "cast to fp16 is faster there"
        )
    return tuple(notes)


def _kept(layer: Layer, node: ir.Node, profile: Profile) -> str:
    """Say why a layer stays in floating point; empty if it need not."""
    if is_quantized(layer):
        return ALREADY
    if node.op_type not in profile.layers:
        other = "a table is looked up, not multiplied" if layer.is_table else "no integer kernel"
        return profile.kept.get(node.op_type, other)
    if layer.is_linear:
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


def is_quantized(layer: Layer) -> bool:
    """Tell whether a layer's weight is stored as integer codes."""
    return layer.dtype in _CODE_TYPES and layer.dtype not in FLOATS


_CODE_TYPES = frozenset(code.numpy().name for code in INTEGER_CODES)


def _read_as_weight(weight: ir.Value) -> bool:
    return all(use.idx == 1 for use in weight.uses()) and not weight.is_graph_output()


def _grid_request(pixel: PixelInput) -> Request:
    return Request(pixel.value, "channel-grid")


def _code_type(signed: bool) -> ir.DataType:
    return ir.DataType.INT8 if signed else ir.DataType.UINT8
