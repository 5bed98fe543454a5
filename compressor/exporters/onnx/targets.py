"""What each runtime accepts of a quantized graph: a table, and the rules that read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir import DataType

from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator, operator_named
from compressor.graph.values import all_nodes, computes_scale, constant_of, input_of, static_shape
from compressor.types.layer_rules import TO_FLOATS

_INT8 = frozenset({DataType.INT8, DataType.UINT8})
_INT16 = frozenset({DataType.INT16, DataType.UINT16})
_PACKED = frozenset({DataType.INT4, DataType.UINT4, DataType.INT2, DataType.UINT2})
_HALVES = frozenset({DataType.FLOAT, DataType.FLOAT16})
_SIGNED = {DataType.UINT8: DataType.INT8, DataType.UINT4: DataType.INT4}


@dataclass(frozen=True)
class Target:
    """The rules of one runtime.

    Attributes:
        activations: element types that activations may be quantized to.
        computes: floating-point types that operators other than casts run in.
        asymmetric: zero points other than 0 are accepted.
        integer_bias: biases may be int32 with a scale.
        integer_operators: operators on integers, such as ``QLinearConv``, are accepted.
        fixed: operators that need a known length of every axis of what they read first.
    """

    title: str
    activations: frozenset[DataType]
    weights: frozenset[DataType]
    scales: frozenset[DataType]
    computes: frozenset[DataType]
    asymmetric: bool = True
    integer_bias: bool = True
    integer_operators: bool = True
    fixed: frozenset[str] = frozenset()


TARGETS: dict[str, Target] = {
    "ort-cpu": Target(
        title="ONNX Runtime on the CPU",
        activations=_INT8 | _INT16,
        weights=_INT8 | _INT16 | _PACKED | {DataType.FLOAT8E4M3FN, DataType.FLOAT8E5M2},
        scales=_HALVES,
        computes=_HALVES | {DataType.DOUBLE},
    ),
    "ort-cuda": Target(
        title="ONNX Runtime's CUDA provider",
        activations=_INT8,
        weights=_INT8 | _PACKED | {DataType.FLOAT8E4M3FN, DataType.FLOAT8E5M2},
        scales=_HALVES,
        computes=_HALVES | {DataType.DOUBLE},
        integer_operators=False,
    ),
    "openvino": Target(
        title="OpenVINO",
        activations=_INT8,
        weights=_INT8
        | {DataType.INT4, DataType.UINT4, DataType.FLOAT4E2M1}
        | {DataType.FLOAT8E4M3FN, DataType.FLOAT8E5M2},
        scales=_HALVES | {DataType.FLOAT8E4M3FN, DataType.FLOAT8E8M0},
        computes=_HALVES | {DataType.DOUBLE},
        fixed=frozenset({"STFT"}),
    ),
    "tensorrt": Target(
        title="TensorRT",
        activations=frozenset({DataType.INT8, DataType.FLOAT8E4M3FN, DataType.FLOAT4E2M1}),
        weights=frozenset(
            {DataType.INT8, DataType.INT4, DataType.FLOAT8E4M3FN, DataType.FLOAT4E2M1}
        ),
        scales=_HALVES | {DataType.BFLOAT16, DataType.FLOAT8E4M3FN, DataType.FLOAT8E8M0},
        computes=_HALVES | {DataType.BFLOAT16},
        asymmetric=False,
        integer_bias=False,
        integer_operators=False,
    ),
}


def first_breach(model: ir.Model, target: Target, *, evaluate: bool) -> tuple[str, str, str] | None:
    """Return subject, problem and remedy of the first thing that a target does not accept.

    Args:
        evaluate: compute zero points that are not yet known; otherwise they are assumed valid.
    """
    first: tuple[ir.Node, str, str] | None = None
    others = 0  # nodes that break the same rule
    for node in all_nodes(model.graph):
        problem = next(filter(None, (rule(node, target) for rule in _RULES)), None)
        problem = problem or _zero_point(node, target, evaluate)
        if problem is None:
            continue
        if first is None:
            first = (node, *problem)
        elif problem[1] == first[2]:
            others += 1
    if first is None:
        return None
    node, reason, remedy = first
    more = f" (and {others} more like it)" if others else ""
    return Owners(model).subject(node), reason + more, remedy


def _open_axes(node: ir.Node, target: Target) -> tuple[str, str] | None:
    if operator(node).name not in target.fixed or node.graph is None:
        return None
    value = input_of(node, 0)
    if value is None or static_shape(value) is not None:
        return None
    named = next((v for v in node.graph.inputs if static_shape(v) is None), None)
    if named is None:  # all lengths follow from those of the inputs
        return None
    return (
        f"{target.title} takes {node.op_type} of a fixed shape only, and axes of input "
        f"{named.name!r} are open",
        f"give every axis of {named.name!r} a number, such as batch 1, in model.inputs of a module "
        "or where the file is made; or leave this export out",
    )


def _integer_operator(node: ir.Node, target: Target) -> tuple[str, str] | None:
    if target.integer_operators:
        return None
    if node.op_type.startswith("QLinear") or operator_named(node.op_type).integer:
        return (
            f"{target.title} does not take {node.op_type}",
            f"start from the float model and quantize it here, or put {TO_FLOATS} and "
            "quantize-static before the export",
        )
    return None


def _folded(node: ir.Node, _: Target) -> tuple[str, str] | None:
    """Refuse a matrix stored as float and quantized at each run: the file gets no smaller."""
    if not operator(node).quantizes:
        return None
    tensor = constant_of(node.inputs[0])
    if tensor is None or len(tensor.shape) < 2:
        return None
    return (
        f"its weight {tensor.name!r} is stored as {tensor.dtype.name.lower()} and quantized when "
        "the model runs",
        "fold constants first, so that the integer codes are stored",
    )


def _stored_type(node: ir.Node, target: Target) -> tuple[str, str] | None:
    if operator(node).family != "quantization" or is_dynamic(node):
        return None
    dtype = quantized_type(node)
    constant = operator(node).dequantizes and constant_of(node.inputs[0]) is not None
    if constant and dtype == DataType.INT32:
        if target.integer_bias:
            return None
        return (
            f"its bias is int32 with a scale, {target.title} takes float biases only",
            "quantize with this export in the spec, so that the bias stays float; a file that is "
            f"quantized already needs {TO_FLOATS} first",
        )
    allowed = target.weights if constant else target.activations
    if dtype is None or dtype in allowed:
        return None
    kind = "weights" if constant else "activations"
    return (
        f"its {kind} are {_name(dtype)}, {target.title} takes {_names(allowed)}",
        _symmetric(kind)
        if not target.asymmetric and _SIGNED.get(dtype) in allowed
        else f"choose another type for {kind}, or another target",
    )


def _scale_type(node: ir.Node, target: Target) -> tuple[str, str] | None:
    if operator(node).family != "quantization":
        return None
    scale = node.inputs[1]
    dtype = None if scale is None else value_type(scale)
    if dtype is None or dtype in target.scales:
        return None
    return (
        f"its scale is {_name(dtype)}, {target.title} takes {_names(target.scales)}",
        "choose another type, or another target",
    )


def _float_type(node: ir.Node, target: Target) -> tuple[str, str] | None:
    row = operator(node)
    if row.family in ("quantization", "cast-like") or row.moves == "type":
        return None
    for value in node.inputs:
        tensor = constant_of(value)
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        if tensor.dtype not in target.computes:
            return (
                f"{tensor.name!r} is {_name(tensor.dtype)}, {target.title} computes in "
                f"{_names(target.computes)}",
                "cast to another type, or choose another target",
            )
    return None


def _zero_point(node: ir.Node, target: Target, evaluate: bool) -> tuple[str, str] | None:
    if target.asymmetric or operator(node).family != "quantization":
        return None
    if input_of(node, 2) is None or is_dynamic(node):
        return None
    tensor = constant_of(node.inputs[2])
    constant = constant_of(node.inputs[0]) is not None
    remedy = _symmetric("weights" if constant else "activations")
    if isinstance(tensor, ir.LazyTensor) and not evaluate:
        # Weights have zero points that are yet to be found only where the scheme has them.
        return (
            (f"its weights have zero points, {target.title} takes 0 only", remedy)
            if constant
            else None
        )
    if tensor is None:
        return f"its zero point is computed, {target.title} takes 0 only", remedy
    values = np.asarray(tensor.numpy()).astype(np.float32).ravel()
    wrong = values[values != 0]
    if not wrong.size:
        return None
    return f"its zero point is {wrong[0]:g}, {target.title} takes 0 only", remedy


def _symmetric(kind: str) -> str:
    other = ", or symmetric: true in quantize-weights" if kind == "weights" else ""
    again = f"; a file that is quantized already needs {TO_FLOATS} first"
    return f"set {kind}.symmetric: true in quantize-static{other}{again}"


def is_dynamic(node: ir.Node) -> bool:
    """Whether the scale is computed from the values as the model runs."""
    scale = node.inputs[1]
    return scale is not None and computes_scale(scale.producer())


def quantized_type(node: ir.Node) -> DataType | None:
    """Return the element type of the quantized side, or ``None`` where the graph does not say."""
    quantizes = operator(node).quantizes
    codes = None if quantizes else node.inputs[0]
    if codes is not None:
        dtype, maker = value_type(codes), codes.producer()
        if dtype is None and operator(maker).quantizes and maker is not None:
            dtype = quantized_type(maker)
        if dtype is not None:
            return dtype
    if (zero := input_of(node, 2)) is not None:
        return value_type(zero)
    if not quantizes:
        return None
    return DataType(node.attributes.get_int("output_dtype", 0) or int(DataType.UINT8))


def value_type(value: ir.Value) -> DataType | None:
    """Return a value's element type: that of its constant, if it is one."""
    tensor = constant_of(value)
    return value.dtype if tensor is None else tensor.dtype


def _name(dtype: DataType) -> str:
    return dtype.name.lower()


def _names(dtypes: frozenset[DataType]) -> str:
    return ", ".join(sorted(_name(d) for d in dtypes))


_Rule = Callable[[ir.Node, Target], "tuple[str, str] | None"]
_RULES: tuple[_Rule, ...] = (
    _open_axes,
    _integer_operator,
    _folded,
    _stored_type,
    _scale_type,
    _float_type,
)


class Owners:
    """Names a node's layer: the node computes the layer, or prepares its inputs."""

    def __init__(self, model: ir.Model):
        self._layers: dict[ir.Node, str] = {}
        for layer, node in layers_with_nodes(model):
            self._layers.setdefault(node, layer.name)
            for value in node.inputs:
                self._claim(value, layer.name)

    def subject(self, node: ir.Node) -> str:
        """Return ``layer 'fc'``; for a node of no layer its constant, or its name and operator."""
        layer = self._layers.get(node)
        if layer is not None:
            return f"layer {layer!r}"
        first = input_of(node, 0)
        if _wraps(node) and first is not None and first.is_initializer():
            return f"tensor {first.name!r}"
        return f"node {node.name!r} ({node.op_type})" if node.name else f"a {node.op_type} node"

    def _claim(self, value: ir.Value | None, layer: str) -> None:
        """Assign to a layer the nodes that wrap its inputs, or compute its weight."""
        node = None if value is None else value.producer()
        if node is None or node in self._layers:
            return
        if not _wraps(node) and not _is_constant(node):
            return
        self._layers[node] = layer
        for inner in node.inputs:
            self._claim(inner, layer)


def _wraps(node: ir.Node) -> bool:
    """Whether a node rounds, casts or turns what a layer reads."""
    row = operator_named(node.op_type)
    rounds = row.family == "quantization" or computes_scale(node)
    return rounds or row.moves in ("type", "order")


def _is_constant(node: ir.Node) -> bool:
    """Whether a node computes something from initializers alone."""
    return all(
        value is None
        or value.is_initializer()
        or ((maker := value.producer()) is not None and _is_constant(maker))
        for value in node.inputs
    )
