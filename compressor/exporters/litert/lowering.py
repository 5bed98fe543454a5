"""Lower a graph to LiteRT's operators: what is live, in which layout, as codes or as floats.

LiteRT's kernels want channels in the last axis, where ONNX has them in the second. A value is
turned where the two meet, once, and everything that works on single elements takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from ai_edge_litert import schema_py_generated as schema

from compressor.errors import SpecError
from compressor.exporters.litert.file import FileBuilder, Quantization, Tensor
from compressor.graph.operators import operator
from compressor.graph.values import constant_of, dims, is_stored, sole_reader
from compressor.types.tensors import Array

_TURNED = 3  # axes from which on the two layouts differ
_BYTE_OFFSET = 128  # between codes of uint8 and of int8
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
# Inputs after which an operator reads only numbers that its own output's shape tells.
_SHAPED = frozenset({"Reshape", "Expand", "Squeeze", "Unsqueeze", "ConstantOfShape"})
_BOUNDS: Mapping[tuple[float, float], str] = {(0, 6): "RELU6", (-1, 1): "RELU_N1_TO_1"}

Lowered = Callable[["Call"], None]


@dataclass(frozen=True)
class Rule:
    """How one ONNX operator is written.

    Attributes:
        lower: emits what computes it.
        integer: it can read and write codes.
        fuses: it takes in the activation behind it.
    """

    lower: Lowered
    integer: bool = False
    fuses: bool = False


@dataclass(frozen=True, eq=False)
class Weight:
    """A constant operand.

    Attributes:
        array: its values, or int8 codes where ``scale`` is given.
        scale: float32, one or one for each position along ``axis``.
    """

    array: Array
    scale: Array | None = None
    axis: int = 0

    def turned(self, order: Sequence[int]) -> Weight:
        """Return it with its axes in another order."""
        return Weight(self.array.transpose(order), self.scale, list(order).index(self.axis))

    @property
    def floats(self) -> Array:
        """Its values."""
        if self.scale is None:
            return self.array
        shape = [1] * self.array.ndim
        if self.scale.size > 1:
            shape[self.axis] = -1
        return np.asarray(self.array.astype(np.float32) * self.scale.reshape(shape))


@dataclass
class Call:
    """One operator on its way into the file.

    Attributes:
        codes: what its result is quantized with, if it computes with integers.
        activation: what it takes in of the operator behind it, in the schema's words.
        result: the value that is there in the end.
    """

    graph: Lowering
    node: ir.Node
    codes: Quantization | None
    activation: str
    result: ir.Value

    @property
    def fused(self) -> int:
        """The number of the activation in the schema."""
        return int(getattr(schema.ActivationFunctionType, self.activation))

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape in ONNX's order, -1 for samples."""
        return shape_of(self.result)

    def operand(self, index: int, last: bool | None = None) -> Tensor:
        """Return an input; ``last`` asks for a layout, ``None`` takes it as it is."""
        value = self.node.inputs[index]
        assert value is not None
        if self.codes is not None:
            return self.graph.codes(value, last)
        return self.graph.tensor(value, last)

    def has(self, index: int) -> bool:
        """Whether an optional input is given."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def constant(self, index: int) -> Array | None:
        """Return a constant input's value; ``None`` where it is left out.

        Raises:
            SpecError: it is computed.
        """
        if not self.has(index):
            return None
        value = self.node.inputs[index]
        assert value is not None
        weight = self.graph.weight(value)
        if weight is None:
            raise self.refusal(f"its input {value.name!r} is computed, and LiteRT wants a constant")
        return weight.floats

    def ints(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """Return an attribute of several integers."""
        attribute = self.node.attributes.get(name)
        return list(default) if attribute is None else [int(x) for x in attribute.as_ints()]

    def refusal(self, problem: str, remedy: str = "") -> SpecError:
        """Return the error that names this node."""
        remedy = remedy or "export onnx for ONNX Runtime instead, or change the network there"
        return SpecError(f"node {self.node.name!r} ({self.node.op_type})", problem, remedy)

    def give(
        self,
        name: str,
        operands: Sequence[Tensor | None],
        options: Any = None,
        *,
        last: bool = False,
        written: Quantization | None = None,
    ) -> None:
        """Emit the operator that writes the result.

        Args:
            last: the result's layout.
            written: what the operator quantizes its result with, if it cannot do so otherwise; it
                is quantized again behind it where that differs.
        """
        graph, result = self.graph, self.result
        at = turned(self.shape) if last else self.shape
        if self.codes is None:
            first = operands[0]
            moved = first.quantization if first is not None else None
            dtype = type_of(result)
            made = graph.emit(name, operands, at, dtype, options, last, result.name, moved)
        else:
            wanted = written or self.codes
            made = graph.emit(name, operands, at, "int8", options, last, result.name, wanted)
            made = graph.requantized(made, self.codes)
        graph.keep(result, made)


@dataclass
class Lowering:
    """A graph on its way into a file.

    Args:
        rules: how operators are written, by their names.
        planned: constants that are not computed yet are taken as zeros: only sizes count.
    """

    model: ir.Model
    rules: Mapping[str, Rule]
    planned: bool = False
    file: FileBuilder = field(default_factory=FileBuilder)
    _tensors: dict[tuple[ir.Value, bool], Tensor] = field(default_factory=dict)
    _constants: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    _floats: dict[int, Tensor] = field(default_factory=dict)
    _done: set[ir.Node] = field(default_factory=set)
    _numbers: dict[str, int] = field(default_factory=dict)
    _aliases: dict[ir.Value, ir.Value] = field(default_factory=dict)  # codes of several names

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Lower everything that the outputs depend on; return inputs and outputs.

        Raises:
            SpecError: LiteRT has no operator for a node, or cannot take a value's shape.
        """
        graph = self.model.graph
        inputs = []
        for value in graph.inputs:
            inputs.append(self.file.tensor(value.name or "", shape_of(value), type_of(value)))
            self.keep(value, inputs[-1])
        live = _live(graph)
        for node in graph:
            if node in live and node not in self._done:
                self._lower(node)
        outputs: list[Tensor] = []
        for value in graph.outputs:
            tensor = self.tensor(value, last=False)
            if tensor.constant or tensor in (*inputs, *outputs):
                tensor = self.reshaped(tensor, tensor.shape)
            self.file.rename(tensor, value.name or "")
            outputs.append(tensor)
        return inputs, outputs

    def _lower(self, node: ir.Node) -> None:
        row = operator(node)
        if row.quantizes:
            self._quantize(node)
            return
        if row.dequantizes or row.family == "constant":
            return  # read where they are needed
        rule = self.rules.get(node.op_type) if row.name or node.domain in ("", "ai.onnx") else None
        plain = Call(self, node, None, "NONE", node.outputs[0])
        if rule is None:
            raise plain.refusal(
                f"LiteRT has no operator for {node.domain or 'ONNX'}'s {node.op_type}"
            )
        for value in node.outputs:
            if value.uses() or value.is_graph_output():
                shape_of(value)
        rule.lower(self._call(node, rule))

    def _call(self, node: ir.Node, rule: Rule) -> Call:
        """Choose whether a node computes with codes, and what it takes in."""
        result = node.outputs[0]
        fused, after = "NONE", sole_reader(result) if rule.fuses else None
        activation = self._activation(after)
        if after is not None and activation:
            fused, result = activation, after.outputs[0]
        plain = Call(self, node, None, fused, result)
        moved = operator(node).moves and self._holds_codes(node.inputs[0])
        if moved:  # codes themselves
            return plain
        quantizers = self._quantizers(result)
        bounded = None
        if not quantizers and fused == "NONE":
            bounded = sole_reader(result)
            if operator(bounded).family == "unary" and operator(bounded).name in ("Relu", "Clip"):
                assert bounded is not None
                quantizers = self._quantizers(bounded.outputs[0])
        if rule.integer and quantizers and self._reads_codes(node):
            codes = self._quantization(quantizers[0])
            if bounded is None or self._implied(bounded, codes):
                self._done.update(quantizers)
                if bounded is not None:
                    self._done.add(bounded)
                if after is not None and activation:
                    self._done.add(after)
                made = quantizers[0].outputs[0]
                call = Call(self, node, codes, fused, made)
                for other in quantizers[1:]:
                    self._aliases[other.outputs[0]] = made
                return call
        if after is not None and activation:
            self._done.add(after)
        return plain

    def _activation(self, node: ir.Node | None) -> str:
        """Return the name of an activation that operators can take in; empty if it is none."""
        if node is None or operator(node).name not in ("Relu", "Clip"):
            return ""
        if node.op_type == "Relu":
            return "RELU"
        return _BOUNDS.get(self.bounds(node), "")

    def bounds(self, clip: ir.Node) -> tuple[float, float]:
        """Return the least and the greatest value that a Clip, or a Relu, lets through."""
        if clip.op_type == "Relu":
            return 0.0, np.inf
        found = []
        for place, key, default in ((1, "min", -np.inf), (2, "max", np.inf)):
            given = clip.inputs[place] if place < len(clip.inputs) else None
            if given is not None:
                weight = self.weight(given)
                found.append(np.nan if weight is None else float(weight.floats))
            else:
                attribute = clip.attributes.get(key)
                found.append(default if attribute is None else float(attribute.as_float()))
        return found[0], found[1]

    def _implied(self, clip: ir.Node, codes: Quantization) -> bool:
        """Whether codes cannot say what a Clip takes away."""
        low, high = self.bounds(clip)
        step = float(codes.scale.reshape(-1)[0])
        least, greatest = (
            step * (end - codes.zero_point) for end in (-_BYTE_OFFSET, _BYTE_OFFSET - 1)
        )
        slack = step / 2
        return self.planned or (low <= least + slack and high >= greatest - slack)

    def _holds_codes(self, value: ir.Value | None) -> bool:
        return any(
            (value, last) in self._tensors and self._tensors[value, last].quantization is not None
            for last in (False, True)
            if value is not None
        )

    def _quantizers(self, value: ir.Value) -> list[ir.Node]:
        """Return what quantizes a value, if nothing else reads it and all do so alike."""
        if value.is_graph_output():
            return []
        readers = [use.node for use in value.uses()]
        if not all(operator(x).quantizes for x in readers):
            return []
        alike = [self._quantization(x) for x in readers]
        return readers if all(x.same_as(alike[0]) for x in alike[1:]) else []

    def _reads_codes(self, node: ir.Node) -> bool:
        """Whether all that a node computes with is dequantized, and its weight symmetric."""
        for value in node.inputs:
            if value is None:
                continue
            weight = self.weight(value)
            if weight is None and not operator(value.producer()).dequantizes:
                return False
            if (
                weight is not None
                and value is node.inputs[operator(node).weight]
                and (operator(node).layer and weight.scale is None)
            ):
                return False
        first = node.inputs[0]
        return first is not None and self.weight(first) is None

    def _quantization(self, node: ir.Node) -> Quantization:
        """Return what a QuantizeLinear or DequantizeLinear of activations does, for int8."""
        scale = self._array(node.inputs[1]).astype(np.float32).reshape(-1)
        if self.planned:
            scale = np.ones_like(scale)
        codes = node.inputs[0] if operator(node).dequantizes else node.outputs[0]
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        offset = 0 if zero is None else int(self._array(zero).reshape(-1)[0])
        unsigned = codes is not None and codes.dtype != ir.DataType.INT8
        if zero is not None and zero.dtype is not None:
            unsigned = zero.dtype == ir.DataType.UINT8
        return Quantization(scale, offset - _BYTE_OFFSET * unsigned)

    def _quantize(self, node: ir.Node) -> None:
        value = node.inputs[0]
        assert value is not None
        source = self.tensor(value)
        shape = source.shape
        name = node.outputs[0].name
        made = self.emit(
            "QUANTIZE", [source], shape, "int8", None, source.last, name, self._quantization(node)
        )
        self.keep(node.outputs[0], made)

    # Values

    def keep(self, value: ir.Value, tensor: Tensor) -> None:
        """Remember what holds a value."""
        self._tensors[value, tensor.last] = tensor

    def tensor(self, value: ir.Value, last: bool | None = None) -> Tensor:
        """Return what holds a value, as floats where it was quantized.

        Args:
            last: the layout; ``None`` for any.
        """
        node = value.producer()
        weight = self.weight(value)
        if weight is not None:
            return self.constant(weight, value.name or "", bool(last))
        if operator(node).dequantizes:
            return self.dequantized(self.codes(value, last))
        return self._at(value, last)

    def codes(self, value: ir.Value, last: bool | None = None) -> Tensor:
        """Return the codes behind a dequantized value."""
        node = value.producer()
        assert node is not None
        source = node.inputs[0]
        assert source is not None
        return self._at(self._aliases.get(source, source), last)

    def _at(self, value: ir.Value, last: bool | None) -> Tensor:
        value = self._aliases.get(value, value)
        order = (False, True) if last is None else (last,)
        for layout in order:
            if (value, layout) in self._tensors:
                return self._tensors[value, layout]
        assert last is not None
        other = self._tensors[value, not last]
        if len(other.shape) < _TURNED:
            return other
        made = self.turned(other)
        self._tensors[value, last] = made
        return made

    def turned(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the other layout."""
        rank = len(tensor.shape)
        order = _back(rank) if tensor.last else _forth(rank)
        shape = tuple(tensor.shape[axis] for axis in order)
        if sum(length != 1 for length in tensor.shape[1:]) <= 1:  # nothing moves
            return self.reshaped(tensor, shape, not tensor.last)
        operands = [tensor, self.numbers(order)]
        return self.emit(
            "TRANSPOSE", operands, shape, tensor.dtype, schema.TransposeOptionsT(), not tensor.last,
            "turned", tensor.quantization,
        )  # fmt: skip

    def weight(self, value: ir.Value) -> Weight | None:
        """Return a constant, codes with their scales; ``None`` for what is computed."""
        node = value.producer()
        if is_stored(value) and constant_of(value) is not None:
            return Weight(self._array(value))
        if not operator(node).dequantizes:
            return None
        assert node is not None
        codes = node.inputs[0]
        if codes is None or constant_of(codes) is None:
            return None
        array, scale = self._array(codes), self._array(node.inputs[1]).astype(np.float32)
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if zero is not None and array.dtype == np.uint8:
            array = (array.astype(np.int16) - self._array(zero).reshape(-1)[0]).clip(-128, 127)
            array = array.astype(np.int8)
        axis = node.attributes.get_int("axis", 1) % max(1, array.ndim)
        return Weight(array, scale.reshape(-1), axis if scale.size > 1 else 0)

    def _array(self, value: ir.Value | None) -> Array:
        tensor = constant_of(value)
        assert tensor is not None
        if self.planned and isinstance(tensor, ir.LazyTensor):
            return np.zeros(tensor.shape.numpy(), tensor.dtype.numpy())
        return np.asarray(tensor.numpy())

    def constant(self, weight: Weight, name: str, last: bool = False, rank: int = 0) -> Tensor:
        """Return a tensor that holds a constant; codes are dequantized when a file is opened.

        Args:
            last: the layout of what it is computed with, which has ``rank`` axes.
        """
        array = weight.array
        missing = max(0, rank - array.ndim)
        if last and max(rank, array.ndim) >= _TURNED:
            array = array.reshape((1,) * missing + array.shape)
            weight = Weight(array, weight.scale, weight.axis + missing)
            weight = weight.turned(_forth(array.ndim))
        else:
            last = False
        if weight.scale is None:
            return self.stored(weight.array, name, last=last)
        codes = Quantization(weight.scale, axis=weight.axis)
        return self.dequantized(self.stored(weight.array, name, codes, last=last))

    def stored(
        self,
        array: Array,
        name: str,
        quantization: Quantization | None = None,
        *,
        last: bool = False,
    ) -> Tensor:
        """Return a tensor of the file that holds an array, the same for the same bytes."""
        array = np.ascontiguousarray(array)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        scales = b"" if quantization is None else quantization.scale.tobytes()
        content = array.tobytes() if array.size < 1 << 12 else name
        key = (array.dtype.name, array.shape, content, scales, last)
        if key not in self._constants:
            self._constants[key] = self.file.tensor(
                self._free(name), array.shape, array.dtype.name, data=array,
                quantization=quantization, last=last,
            )  # fmt: skip
        return self._constants[key]

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Return a tensor that holds axes, lengths and the like."""
        return self.stored(np.array(values, np.int32), "numbers")

    def scalar(self, value: float) -> Tensor:
        """Return a tensor that holds one float."""
        return self.stored(np.array(value, np.float32), "scalar")

    # Operators

    def emit(
        self,
        name: str,
        operands: Sequence[Tensor | None],
        shape: Sequence[int],
        dtype: str,
        options: Any = None,
        last: bool = False,
        called: str | None = None,
        quantization: Quantization | None = None,
    ) -> Tensor:
        """Add an operator with one result; return that."""
        label = self._free(called or name.lower())
        made = self.file.tensor(label, shape, dtype, quantization=quantization, last=last)
        self.file.operator(name, operands, [made], options)
        return made

    def requantized(self, tensor: Tensor, wanted: Quantization) -> Tensor:
        """Return codes with another scale, or the same where it is that already."""
        given = tensor.quantization
        assert given is not None
        if given.same_as(wanted):
            return tensor
        return self.emit(
            "QUANTIZE", [tensor], tensor.shape, "int8", None, tensor.last, "requantized", wanted
        )

    def dequantized(self, tensor: Tensor) -> Tensor:
        """Return codes as floats; what holds floats already as it is."""
        if tensor.quantization is None:
            return tensor
        if tensor.index not in self._floats:
            self._floats[tensor.index] = self.emit(
                "DEQUANTIZE", [tensor], tensor.shape, "float32", None, tensor.last, "floats"
            )
        return self._floats[tensor.index]

    def reshaped(self, tensor: Tensor, shape: Sequence[int], last: bool = False) -> Tensor:
        """Return the same elements in another shape."""
        options = schema.ReshapeOptionsT()
        options.newShape = np.array(shape, np.int32)
        operands = [tensor, self.numbers(shape)]
        return self.emit(
            "RESHAPE", operands, shape, tensor.dtype, options, last, "reshaped", tensor.quantization
        )

    def _free(self, name: str) -> str:
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        return f"{name}_{number}" if number else name


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Return a value's shape, -1 for samples.

    Raises:
        SpecError: another axis than the first has no fixed length.
    """
    shape = dims(value, symbolic=-1)
    if shape is None or any(length < 0 for length in shape[1:]):
        given = "no known shape" if value.shape is None else f"the shape {list(value.shape)}"
        raise SpecError(
            f"value {value.name!r}",
            f"has {given}; in a LiteRT file only the first axis may have any length",
            "give the inputs fixed lengths in model.inputs, all but the first",
        )
    return shape


def type_of(value: ir.Value) -> str:
    """Return the name of a value's type; codes are int8 in the file."""
    if value.dtype is None:
        return "float32"
    return "int8" if value.dtype in _BYTES else value.dtype.numpy().name


def turned(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with its channels last."""
    if len(shape) < _TURNED:
        return tuple(shape)
    return tuple(shape[axis] for axis in _forth(len(shape)))


def _forth(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _back(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _live(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that outputs depend on, but for those that compute known shapes."""
    live: set[ir.Node] = set()
    waiting = [value.producer() for value in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in live:
            continue
        live.add(node)
        read = node.inputs[:1] if node.op_type in _SHAPED else node.inputs
        waiting.extend(value.producer() for value in read if value is not None)
    return live
