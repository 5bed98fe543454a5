"""``quantize-weights``: options, schemes of layers, and why layers are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.codes import obstacle
from compressor.models.layer_uses import LOOKED_UP, inner_layers, kept_tables, routers
from compressor.models.transformers.reading import reading_of
from compressor.passes.quantize.weights.inputs import COMPRESSED_TENSORS, check_inputs
from compressor.run.weight_pass import Treatment
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import resolve_rules, skip_reason
from compressor.types.layers import Layer, ScaleType, Scheme
from compressor.types.passes import LayerRule
from compressor.types.rounded_inputs import InputFormat, InputScheme

Preset = Literal[
    "int8",
    "int4-g128",
    "int4-g32",
    "int2-g32",
    "fp8",
    "nvfp4",
    "mxfp4",
    "int8-w8a8",
    "int8-w8a8-static",
    "fp8-w8a8",
    "fp8-w8a8-static",
    "nvfp4-w4a4",
    "mxfp4-w4a4",
]
Method = Literal["rtn", "hqq", "gptq", "awq", "reconstruct"]
Format = Literal["int", "fp8-e4m3", "mxfp4", "nvfp4"]
Bits = Literal[8, 6, 5, 4, 3, 2]
Activations = Literal[InputFormat, "float"]

DEFAULT_PRESET: Preset = "int4-g128"
NARROW_BITS = (3, 2)
_TABLE = f"{LOOKED_UP}; embeddings: true stores it as codes"
_SCALES = ("float32", "float16", "bfloat16")
_WIDE = 8  # bits, at which one code more is worth nothing
_FIXED_GROUPS: Mapping[Format, int] = {"mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Numbers:
    """The number format of a layer's weight, whatever its own dtype is."""

    format: Format = "int"  # integers, or a format of floats
    bits: int = 8  # width of an integer code
    group: int | None = None  # columns that share a scale; `None` for one scale a row
    symmetric: bool = True  # integers have the zero point 0
    inputs: InputScheme | None = None  # how activations are rounded, where they are

    def scheme(self, layer: Layer) -> Scheme:
        """Return the scheme for a layer; scales are stored in the dtype of its weight."""
        if self.format == "mxfp4":
            return Scheme(4, True, True, "group", 32, "e2m1", "e8m0")
        if self.format == "nvfp4":
            return Scheme(4, True, True, "group", 16, "e2m1", "e4m3")
        granularity: Literal["channel", "group"] = "group" if self.group else "channel"
        kept = layer.dtype if layer.dtype in _SCALES else "float32"
        stored = cast("ScaleType", kept)
        if self.format == "fp8-e4m3":
            return Scheme(8, True, True, granularity, self.group, "e4m3", stored)
        return Scheme(
            self.bits,
            self.symmetric,
            signed=self.symmetric,
            granularity=granularity,
            group=self.group,
            scale_type=stored,
            narrow=False,
            signed_scale=self.symmetric and self.bits < _WIDE and self.inputs is None,
        )

    def changed(self, rule: WeightRule | None) -> Numbers:
        """Return this format as a rule changes it.

        Raises:
            SpecError: the rule's settings contradict each other.
        """
        if rule is None:
            return self
        group = self.group if rule.group is None else rule.group
        symmetric = self.symmetric if rule.symmetric is None else rule.symmetric
        bits = self.bits if rule.bits is None else rule.bits
        subject = f"layer rule {rule.match!r}"
        if rule.format is None and self.format != "int":
            check_float(self.format, rule.bits, rule.group, rule.symmetric, subject)
        if rule.format not in (None, "int"):
            assert rule.format is not None
            check_float(rule.format, rule.bits, rule.group, rule.symmetric, subject)
            group = rule.group
            symmetric = True
        return replace(
            self,
            format=rule.format or self.format,
            bits=bits,
            group=None if group == "channel" else group,
            symmetric=symmetric,
            inputs=input_scheme(rule.activations, rule.static, self.inputs),
        )


PRESETS: Mapping[Preset, Numbers] = {
    "int8": Numbers(bits=8),
    "int4-g128": Numbers(bits=4, group=128),
    "int4-g32": Numbers(bits=4, group=32),
    "int2-g32": Numbers(bits=2, group=32, symmetric=False),
    "fp8": Numbers("fp8-e4m3"),
    "nvfp4": Numbers("nvfp4"),
    "mxfp4": Numbers("mxfp4"),
    "int8-w8a8": Numbers(bits=8, inputs=InputScheme("int8")),
    "int8-w8a8-static": Numbers(bits=8, inputs=InputScheme("int8", static=True)),
    "fp8-w8a8": Numbers("fp8-e4m3", inputs=InputScheme("fp8-e4m3")),
    "fp8-w8a8-static": Numbers("fp8-e4m3", inputs=InputScheme("fp8-e4m3", static=True)),
    "nvfp4-w4a4": Numbers("nvfp4", inputs=InputScheme("nvfp4")),
    "mxfp4-w4a4": Numbers("mxfp4", inputs=InputScheme("mxfp4")),
}


def input_scheme(
    activations: Activations | None, static: bool | None, usual: InputScheme | None
) -> InputScheme | None:
    """Return how inputs are rounded by what options say; what they leave out stays as usual."""
    if activations == "float":
        return None
    if activations is None:
        return usual if usual is None or static is None else replace(usual, static=static)
    return InputScheme(activations, bool(static))


class WeightRule(LayerRule):
    """Per-layer settings of ``quantize-weights``."""

    bits: Bits | None = Field(default=None, description="width of these layers' weights")
    group: Annotated[int, Field(ge=1)] | Literal["channel"] | None = Field(
        default=None, description="columns that share a scale, or channel: a whole row"
    )
    symmetric: bool | None = Field(default=None, description="zero point 0")
    format: Format | None = Field(default=None, description="integers, or a format of floats")
    activations: Activations | None = Field(
        default=None, description="what these layers' inputs are rounded to; float rounds nothing"
    )
    static: bool | None = Field(
        default=None, description="one stored scale for all of a layer's inputs"
    )


def numbers_of(
    preset: Preset | None,
    bits: Bits | None,
    group: int | None,
    symmetric: bool | None,
    format: Format | None,
) -> Numbers:
    """Return the number format that a pass's options give to layers without a rule.

    Raises:
        SpecError: options contradict each other.
    """
    given = {"bits": bits, "group": group, "symmetric": symmetric, "format": format}
    named = [name for name, value in given.items() if value is not None]
    if preset is not None and named:
        raise SpecError(
            f"preset {preset!r}",
            f"is given together with {' and '.join(named)}",
            "set the preset, or bits, group, symmetric and format",
        )
    if not named:
        return PRESETS[preset or DEFAULT_PRESET]
    if format not in (None, "int"):
        assert format is not None
        check_float(format, bits, group, symmetric, f"format {format!r}")
        return Numbers(format, group=group)
    if bits is None:
        raise SpecError("bits", f"is not given, {named[0]} is", "give bits: 8, 6, 5, 4, 3 or 2")
    return Numbers("int", bits, group, symmetric is not False)


def check_float(
    format: Format,
    bits: int | None,
    group: int | Literal["channel"] | None,
    symmetric: bool | None,
    subject: str,
) -> None:
    """Check that a format of floats has these settings.

    Raises:
        SpecError: there is one.
    """
    width, fixed = 8 if format == "fp8-e4m3" else 4, _FIXED_GROUPS.get(format)
    if bits not in (None, width):
        problem = f"bits is {bits}, {format} has {width}"
        raise SpecError(subject, problem, "leave bits out, or set format: int")
    if symmetric is False:
        problem = f"symmetric is false, {format} has no zero point"
        raise SpecError(subject, problem, "leave symmetric out")
    if fixed is not None and group not in (None, fixed):
        problem = f"group is {group}, {format} has groups of {fixed}"
        raise SpecError(subject, problem, "leave group out")


GGUF, GENAI = "gguf", "genai"
_HALF_SCALES = frozenset({"gptq", "awq"})  # targets whose scales have 16 bits
_SIGNED_SCALES = _HALF_SCALES | {COMPRESSED_TENSORS, GGUF, GENAI, "ort-cpu"}
"""Targets that are known to multiply with negative scales; TensorRT refuses them."""
_GGUF_BLOCK, _GGUF_LARGE = 32, 256  # columns
_LINEAR_ONLY = "the compressed-tensors layout holds linear layers only"
_LATEST_OPSET = 24  # for models without a graph: nothing is too old


def choose_layers(
    carrier: Carrier,
    numbers: Numbers,
    rules: Sequence[WeightRule],
    targets: frozenset[str],
    *,
    fits: bool,
    tables: bool,
) -> dict[str, Treatment]:
    """Return the scheme of each layer, or why it is kept, by layer name.

    Args:
        carrier: the model.
        numbers: for layers without a rule.
        rules: for single layers.
        targets: of the exports that follow.
        fits: layers that do not divide into groups are kept; otherwise they are an error.
        tables: tables and the output layer are quantized too.

    Raises:
        SpecError: a rule matches no layer or contradicts itself, columns do not divide into
            groups, or a target does not take a scheme.
    """
    by_layer = resolve_rules(rules, carrier.layers())
    stay = {} if tables else kept_tables(carrier)
    stay = {name: _TABLE if why == LOOKED_UP else why for name, why in stay.items()}
    kept = {**routers(carrier), **inner_layers(carrier), **stay}
    has_graph = Capability.GRAPH in carrier.offers
    opset = carrier.graph().opset_imports.get("", 0) if has_graph else _LATEST_OPSET
    linear_only = not has_graph or bool(targets & {COMPRESSED_TENSORS, GGUF, GENAI, *_HALF_SCALES})
    if linear_only:
        unread = _unread(carrier)
        if not tables:
            _check_some_read(carrier, unread)
        kept = {**unread, **kept}
    treatments = {}
    for layer in carrier.layers():
        rule = by_layer[layer.name]
        wanted = numbers.changed(rule)
        scheme, inputs = wanted.scheme(layer), wanted.inputs
        if GGUF in targets:
            scheme = _in_blocks(scheme, layer)
        if not targets <= _SIGNED_SCALES:
            scheme = replace(scheme, signed_scale=False)
        if targets & _HALF_SCALES and scheme.scale_type == "float32":
            scheme = replace(scheme, scale_type="float16")
        reason = skip_reason(rule) or kept.get(layer.name, "")
        reason = reason or _unfit(layer, targets, linear_only=linear_only)
        strict = not fits or (rule is not None and rule.group is not None)
        reason = reason or _misfit(layer, scheme, opset, error=strict)
        if not reason and "tensorrt" in targets:
            _check_tensorrt(layer, scheme)
        if reason or inputs is None:
            setting = None if reason else scheme
            treatments[layer.name] = Treatment(str(scheme), kept=reason, setting=setting)
            continue
        check_inputs(carrier, layer, scheme, inputs, targets)
        action = f"{scheme}, {inputs}"
        treatments[layer.name] = Treatment(action, setting=scheme, inputs=inputs)
    return treatments


def _unfit(layer: Layer, targets: frozenset[str], *, linear_only: bool) -> str:
    """Return why no target takes codes of a layer, whatever its scheme; empty if they do."""
    if linear_only and (len(layer.shape) != 2 or layer.transposed):
        return _LINEAR_ONLY
    if layer.is_recurrent and "tensorrt" in targets:
        return "TensorRT reads weights of recurrent layers as floats only"
    if GGUF in targets and layer.columns % _GGUF_BLOCK:
        return f"its {layer.columns} columns do not divide into GGUF's blocks of 32"
    return ""


def _in_blocks(scheme: Scheme, layer: Layer) -> Scheme:
    """Return a scheme whose scales GGUF stores as they are.

    They are numbers of float16. Small blocks store zero point times scale as well, which has to be
    such a number, too; large ones store both factors.
    """
    if scheme.element != "int":
        return scheme
    width = scheme.group or layer.columns
    exact = scheme.symmetric or width % _GGUF_LARGE == 0
    return replace(scheme, scale_type="float16" if exact else "float16m6")


def _unread(carrier: Carrier) -> dict[str, str]:
    """Return the layers whose codes ``transformers`` would not read, and why, by name."""
    reading = reading_of(carrier)
    if reading is None:
        return {}
    matrices = (layer for layer in carrier.layers() if len(layer.shape) == 2)
    reasons = {
        layer.name: reading.obstacle(layer.weight, is_table=layer.is_table) for layer in matrices
    }
    return {name: reason for name, reason in reasons.items() if reason}


def _check_some_read(carrier: Carrier, unread: Mapping[str, str]) -> None:
    """Raise :class:`SpecError` where ``transformers`` reads codes of no linear layer at all."""
    linear = [layer.name for layer in carrier.layers() if layer.is_linear]
    if not linear or not all(name in unread for name in linear):
        return
    shown = Counter(unread[name] for name in linear).most_common(1)[0][0]
    raise SpecError(
        "layout compressed-tensors",
        f"has codes for none of the {len(linear)} linear layers: {shown}",
        "write a spec with model.factory (compress init DIRECTORY does) and the export format "
        "safetensors or onnx",
    )


def _misfit(layer: Layer, scheme: Scheme, opset: int, *, error: bool) -> str:
    """Return why a layer cannot have a scheme; empty if it can.

    Raises:
        SpecError: its columns do not divide into groups, and that is to be an error.
    """
    undivided = scheme.group is not None and layer.columns % scheme.group != 0
    kernel = () if layer.is_recurrent else layer.shape[2:]
    blocked = layer.is_transposed_convolution or any(d != 1 for d in kernel)
    if undivided and not blocked:
        problem = f"{layer.columns} input columns do not divide into groups of {scheme.group}"
        if error:
            raise SpecError(f"layer {layer.name!r}", problem, "choose a divisor or skip the layer")
        return problem
    return obstacle(layer, scheme, opset) or ""


def _check_tensorrt(layer: Layer, scheme: Scheme) -> None:
    """Raise :class:`SpecError` where TensorRT does not take a scheme."""
    integers = scheme.element == "int"
    if not scheme.symmetric:
        problem, remedy = "takes zero point 0 only", "set symmetric: true"
    elif integers and scheme.bits in NARROW_BITS:
        problem, remedy = "has integers of 8 and 4 bits", "set bits: 8 or 4"
    elif integers and scheme.bits == 4 and scheme.granularity != "group":
        problem, remedy = "takes 4 bits in groups only", "set a group, such as 128"
    else:
        return
    raise SpecError(
        f"layer {layer.name!r}", f"would be {scheme}, and target tensorrt {problem}", remedy
    )
