"""What the options of ``quantize-static`` make of a graph: which layers, values and codes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.graph.codes import obstacle
from compressor.graph.layers import graph_layers, layer_of, layers_with_nodes
from compressor.models.layer_uses import MIXED, paired_positions, small_table
from compressor.passes.quantize.maths.affine import activation_parameters
from compressor.passes.quantize.static.islands import Choice, choose
from compressor.passes.quantize.static.obstacles import end_layers, feeds_steep, no_kernel
from compressor.passes.quantize.static.options import (
    ActivationOptions,
    QuantizeRule,
    WeightSettings,
)
from compressor.passes.quantize.static.pixels import (
    PixelInput,
    common_code,
    level_moments,
    levels_of,
    pixel_inputs,
    read_pixels,
)
from compressor.passes.quantize.static.placement import (
    ActivationCode,
    Placement,
    Profile,
    float_input,
    place,
    why_not_placed,
)
from compressor.passes.quantize.static.predictions import base_of
from compressor.types.carrier import Carrier
from compressor.types.layer_rules import by_layer_name, resolve_rules, rule_of, skip_reason
from compressor.types.layers import Layer, Scheme
from compressor.types.passes import PassContext
from compressor.types.statistics import ChannelGrid, Moments, Request

_STEEP = "a root or a logarithm of its output makes what rounding adds to small values large"
_BYTE = 8
_ROWS = Scheme(_BYTE)  # of tables, whose rows are looked up before they become floats
# What was chosen last for each graph, which is surveyed, previewed and quantized: to choose takes
# a third of a second for an encoder of twelve blocks.
_CHOSEN: WeakKeyDictionary[ir.Model, tuple[Any, Choice | None]] = WeakKeyDictionary()
_NARROW_FROM = 3  # bits: of two, the fourth code is worth more than products that cannot overflow


@dataclass(frozen=True)
class StaticSettings:
    """Options, with the rules of the target that they are for."""

    profile: Profile
    weights: WeightSettings
    activations: ActivationOptions
    rules: Sequence[QuantizeRule]
    faster: bool = False  # layers that the target computes faster as floats stay floats
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of inputs
    wide_ends: bool = False  # the first and last layers have 8 bits, unless a rule gives others
    ends: Collection[str] = ()  # those layers, once a graph has been looked at

    @property
    def symmetric(self) -> bool:
        """Activations' zero points are 0, and their codes signed."""
        symmetric = self.activations.symmetric
        return not self.profile.unsigned if symmetric == "auto" else symmetric

    @property
    def code_type(self) -> ir.DataType:
        """The type of activations' codes."""
        return ir.DataType.INT8 if self.symmetric else ir.DataType.UINT8

    def activation_type(self, layer: str) -> str:
        """Return what a layer's input becomes, for plans."""
        return f"{'int' if self.symmetric else 'uint'}{self.input_bits(layer)}"

    def activation_scheme(self, bits: int) -> Scheme:
        """Return what activations of a width become."""
        return Scheme(bits, self.symmetric, self.symmetric, "tensor")

    def input_bits(self, layer: str) -> int:
        """Return the width of what a layer reads, by its rule or that of all."""
        rule = rule_of(self.rules, layer)
        return (rule and rule.activation_bits) or self._width(layer, self.activations.bits)

    def weight_scheme(self, layer: Layer, rule: QuantizeRule | None) -> Scheme:
        """Return what a layer's weight becomes."""
        granularity = (rule and rule.granularity) or self.weights.granularity
        if layer.is_transposed_convolution and layer.groups > 1:
            granularity = "tensor"
        bits = (rule and rule.bits) or self._width(layer.name, self.weights.bits)
        avoids, symmetric = self.avoids_overflow and bits == _BYTE, self.weights.symmetric
        return Scheme(
            bits=bits,
            symmetric=symmetric,
            signed=symmetric or not avoids,  # unsigned times unsigned is added in 32 bits
            granularity=granularity,
            narrow=bits >= _NARROW_FROM,
            paired=paired_positions(layer) if avoids and symmetric else None,
        )

    @property
    def avoids_overflow(self) -> bool:
        """Products of bytes must not overflow on x86 CPUs without VNNI."""
        return self.profile.saturates and self.weights.overflow == "avoid"

    def _width(self, layer: str, usual: int) -> int:
        return _BYTE if layer in self.ends else usual

    def code(self, scale: float, zero: int, bits: int) -> ActivationCode:
        """Return how a value is quantized with a scale and a zero point."""
        if bits == _BYTE:
            return ActivationCode(scale, zero, self.code_type)
        scheme = self.activation_scheme(bits)
        limits = ((scheme.low - zero) * scale, (scheme.high - zero) * scale)
        return ActivationCode(scale, zero, self.code_type, limits)

    def check(self) -> None:
        """Compare the options with each other and with the target.

        Raises:
            SpecError: they do not fit.
        """
        activations = self.activations
        if activations.percentile is not None and activations.observer != "percentile":
            raise SpecError(
                "activations.percentile",
                f"is given, and the observer is {activations.observer_name}",
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

    def decide(self, model: ir.Model, known: Decision | None = None) -> Decision:
        """Choose the layers to quantize, in one walk over a graph, which is not changed.

        What is faster as floats is taken over from what is ``known`` of a graph of equal nodes, and
        chosen once for each graph and options.

        Raises:
            SpecError: a rule matches no layer.
        """
        readers = {node: layer for layer, node in layers_with_nodes(model)}
        nodes = {layer.name: node for node, layer in reversed(readers.items())}
        layers = graph_layers(model)
        placeable = {
            layer.name
            for node, layer in readers.items()
            if node.graph is model.graph and float_input(node) is not None
        }
        ends = end_layers(model, readers) if self.wide_ends else ()
        settings = replace(self, rules=by_layer_name(self.rules, layers), ends=ends)
        rules = resolve_rules(settings.rules, layers)
        schemes, reasons = dict[str, Scheme](), dict[str, str]()
        for layer in layers:
            rule = rules[layer.name]
            reason = skip_reason(rule) or no_kernel(layer, nodes.get(layer.name), self.profile)
            if not reason and layer.name not in placeable:
                reason = why_not_placed(nodes.get(layer.name))
            if not reason and rule is None and feeds_steep(nodes[layer.name]):
                reason = _STEEP
            if reason:
                reasons[layer.name] = reason
                continue
            schemes[layer.name] = settings.weight_scheme(layer, rule)
        choice = known.choice if known else self._choice(model, readers, schemes, rules)
        choice = choice.copied(known.model.graph, model.graph) if choice and known else choice
        for name, reason in choice.floats.items() if choice else ():
            del schemes[name]
            reasons[name] = reason
        return Decision(settings, model, readers, layers, schemes, reasons, choice)

    def _choice(
        self,
        model: ir.Model,
        readers: Mapping[ir.Node, Layer],
        names: Collection[str],
        rules: Mapping[str, QuantizeRule | None],
    ) -> Choice | None:
        """Choose the layers that stay floats; those with a rule become integer."""
        if not self.faster or {self.weights.bits, self.activations.bits} != {_BYTE}:
            return None
        forced = [name for name in names if rules[name] is not None]
        asked = (self.profile, list(names), forced, self.samples)
        known, choice = _CHOSEN.get(model, (None, None))
        if known != asked:
            choice = choose(model, self.profile, readers, names, forced, self.samples)
            _CHOSEN[model] = asked, choice
        return choice


@dataclass(frozen=True, eq=False)
class Decision:
    """What is quantized in one graph."""

    settings: StaticSettings  # the options, and the target's rules
    model: ir.Model
    # the layer that each node multiplies with, in the order of execution
    readers: Mapping[ir.Node, Layer]
    layers: tuple[Layer, ...]  # the same layers, each weight once
    schemes: Mapping[str, Scheme]  # of the layers to quantize, by name
    reasons: Mapping[str, str]  # why the other layers are kept, by name
    choice: Choice | None = None  # what stays floats because integers gain too little

    @cached_property
    def placement(self) -> Placement:
        """Which values get Q/DQ, and who reads them."""
        chosen = None if self.choice is None else self.choice.nodes
        return place(self.model, self.settings.profile, self.schemes, self.readers, chosen)

    @property
    def faster(self) -> Collection[str]:
        """Names of the layers that stay floats because integers gain too little."""
        return () if self.choice is None else self.choice.floats

    def notes(self, carrier: Carrier, context: PassContext) -> tuple[str, ...]:
        """Return what the choice of layers is predicted to bring, and which have 8 bits unasked."""
        notes: list[str] = []
        if self.choice is not None and self.choice.floats:
            integers, floats = len(self.schemes), len(self.choice.floats)
            base = base_of(carrier, context)
            notes.append(
                f"{integers:,} of {integers + floats:,} layers compute with integers, which gain "
                "too little in others (the rule {match: '*'} takes integers for all): predicted "
                f"latency in ONNX Runtime over {base.name}: {base.times(self.choice.ratios)}; if "
                f"all layers computed with integers, {base.times(self.choice.integer_ratios)}"
            )
        settings = self.settings
        wide = [x for x in self.schemes if x in settings.ends and settings.input_bits(x) == _BYTE]
        if wide:
            notes.append(
                f"the first and last layers ({', '.join(wide)}) have 8 bits; "
                "first-last: same treats them like the others"
            )
        return tuple(notes)

    @cached_property
    def nodes(self) -> dict[str, ir.Node]:
        """The first node that multiplies with each layer's weight, by the layer's name."""
        return {layer.name: node for node, layer in reversed(list(self.readers.items()))}

    @cached_property
    def stored(self) -> Mapping[str, Scheme]:
        """Schemes of weights that are stored as codes and computed with as floats, by layer.

        They are large tables, those of recurrent layers, those in branches and bodies, those that
        are computed with faster as floats, and those that are also read transposed.
        """
        target = self.settings.profile.target
        if target.startswith("tensorrt"):  # its Gather and LSTM read floats
            return {}
        recurrent = target != "openvino" or not self.schemes  # beside integers, wants constants
        outside = {x.weight for node, x in self.readers.items() if node.graph is self.model.graph}
        schemes = {}
        for layer in self.layers:
            rule = rule_of(self.settings.rules, layer.name)
            scheme = _ROWS if layer.is_table else self.settings.weight_scheme(layer, rule)
            fits = recurrent if layer.is_recurrent else layer.weight not in outside
            fits = not small_table(layer) if layer.is_table else fits
            fits = fits or layer.name in self.faster or self.reasons.get(layer.name) == MIXED
            if layer.name in self.schemes or skip_reason(rule) or not fits:
                continue
            scheme = replace(scheme, signed=True, paired=None)  # no product of bytes
            opset = self.model.opset_imports.get("", 0)
            lies_here = layer.weight in self.model.graph.initializers
            if lies_here and layer.dtype == "float32" and not obstacle(layer, scheme, opset):
                schemes[layer.name] = scheme
        return schemes

    def requests(self) -> tuple[Request, ...]:
        """Return what has to be known of the activations."""
        ranges = (r for name in self.placement.values for r in self.range_requests(name))
        grids = (pixel.request for pixel in self.pixel_inputs())
        return tuple({r.key: r for r in (*ranges, *grids)}.values())

    def value_bits(self, value: str) -> int:
        """Return the width of a value: the widest that any of its readers is to have."""
        settings, value = self.settings, self.placement.joined.get(value, value)
        widths = [settings.input_bits(layer) for layer in self.placement.readers.get(value, ())]
        return max(widths, default=settings.activations.bits)

    def value_scheme(self, value: str) -> Scheme:
        """Return what a value becomes; bytes saturate at their own ends."""
        scheme = self.settings.activation_scheme(self.value_bits(value))
        return replace(scheme, narrow=scheme.narrow and scheme.bits < _BYTE)

    def range_requests(self, value: str) -> tuple[Request, ...]:
        """Ask for the range that a value is rounded in, from each observer that may be chosen."""
        activations, value = self.settings.activations, self.placement.joined.get(value, value)
        options = {
            "bits": self.value_bits(value),
            "symmetric": self.settings.symmetric,
            **activations.observer_options,
        }
        gate = self.placement.gates.get(value)
        return tuple(Request(value, name, options, gate) for name in activations.observers)

    def codes(
        self,
        pixels: Mapping[str, ActivationCode],
        statistics: Mapping[str, Any],
        observer: int = 0,
        values: Iterable[str] | None = None,
    ) -> dict[str, ActivationCode]:
        """Return how each value is quantized: as in ``pixels``, or by an observer's range."""
        codes, symmetric = dict(pixels), self.settings.symmetric
        for name in self.placement.values if values is None else values:
            if name not in codes:
                span = statistics[self.range_requests(name)[observer].key]
                bits = self.value_bits(name)
                scale, zero = activation_parameters(span, bits, symmetric, symmetric)
                codes[name] = self.settings.code(scale, zero, bits)
        return codes

    def pixel_inputs(self) -> list[PixelInput]:
        """Return the inputs that may be images whose pixels the codes can be."""
        settings = self.settings
        if not settings.activations.exact_pixels:
            return []
        return [
            pixel
            for pixel in pixel_inputs(self.model, self.readers)
            if pixel.layer.name in self.schemes and settings.input_bits(pixel.layer.name) == _BYTE
        ]

    def with_pixels(
        self, statistics: Mapping[str, Any], moments: dict[str, Moments]
    ) -> tuple[Decision, dict[str, ActivationCode]]:
        """Give inputs that are images codes that are their pixels.

        The graph is changed in place where one scale and zero point do not hold the pixels of all
        channels.

        Args:
            statistics: the answers to :meth:`requests`.
            moments: of the layers' inputs, by the layer's name; changed where a layer's input is.

        Returns:
            The decision about the graph as it is then, and the codes by the value's name.
        """
        readers, codes = dict(self.readers), dict[str, ActivationCode]()
        signed, dtype = self.settings.symmetric, self.settings.code_type
        for pixel in self.pixel_inputs():
            grid = statistics[pixel.request.key]
            if grid is None:
                continue
            common = None if signed else common_code(grid)
            if common is not None:
                codes[pixel.value] = ActivationCode(*common, dtype)
                continue
            name, used = read_pixels(self.model, pixel, grid, signed=signed)
            codes[name] = ActivationCode(1.0, 0, dtype)
            layer = layer_of(pixel.node)
            assert layer is not None
            readers[pixel.node] = layer
            if layer.name in moments:
                moments[layer.name] = level_moments(moments[layer.name], used)
        return replace(self, readers=readers), codes

    def pixel_grids(self, statistics: Mapping[str, Any]) -> dict[str, ChannelGrid]:
        """Return the grids that :meth:`with_pixels` folds into layers, by the layer's name."""
        signed, grids = self.settings.symmetric, {}
        for pixel in self.pixel_inputs():
            grid = statistics[pixel.request.key]
            if grid is not None and (signed or common_code(grid) is None):
                grids[pixel.layer.name] = levels_of(grid, signed=signed)
        return grids
