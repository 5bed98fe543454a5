"""The values of a graph as tensors of a LiteRT file: constants, layouts, codes and floats.

LiteRT's kernels want channels in the last axis, where ONNX has them in the second. A value is
turned where the two meet, once, and everything that works on single elements takes it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import onnx_ir as ir
from ai_edge_litert import schema_py_generated as schema
from onnx.reference import ReferenceEvaluator

from compressor.errors import SpecError
from compressor.exporters.litert.file import FileBuilder, Quantization, Tensor
from compressor.graph.operators import operator
from compressor.graph.values import DEFAULT_DOMAINS, constant_of, dims, input_of, is_stored
from compressor.types.tensors import Array

_HALF = "float16"
_TURNED = 3  # axes from which on the two layouts differ


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

    def taken(self, places: Array) -> Weight:
        """Return it with what lies along its first axis in another order."""
        scale = self.scale
        if scale is not None and scale.size > 1 and self.axis == 0:
            scale = scale[places]
        return Weight(self.array[places], scale, self.axis)

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
class Store:
    """Finds, or puts into the file, what holds a value.

    Args:
        planned: constants that are not computed yet are taken as zeros: only sizes count.

    Attributes:
        orders: of layers, the order in which their output channels are stored.
    """

    model: ir.Model
    planned: bool = False
    file: FileBuilder = field(default_factory=FileBuilder)
    orders: dict[ir.Node, Array] = field(default_factory=dict)
    _tensors: dict[tuple[ir.Value, bool], Tensor] = field(default_factory=dict)
    _constants: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    _floats: dict[int, Tensor] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _made: dict[ir.Value, Weight | None] = field(default_factory=dict)  # of constants
    _aliases: dict[ir.Value, ir.Value] = field(default_factory=dict)  # codes of several names

    def keep(self, value: ir.Value, tensor: Tensor) -> None:
        """Remember what holds a value."""
        self._tensors[value, tensor.last] = tensor

    def alias(self, value: ir.Value, other: ir.Value) -> None:
        """Let a value be held by what holds another."""
        self._aliases[value] = other

    def holds_codes(self, value: ir.Value | None) -> bool:
        """Whether a value is codes of an activation."""
        if value is None:
            return False
        held = [self._tensors.get((value, last)) for last in (False, True)]
        return any(x is not None and x.quantization is not None for x in held)

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
        order = back(rank) if tensor.last else forth(rank)
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
            return Weight(self.array(value))
        if not operator(node).dequantizes:
            return self._folded(value)
        assert node is not None
        codes = node.inputs[0]
        if codes is None or constant_of(codes) is None:
            return None
        array, scale = self.array(codes), self.array(node.inputs[1]).astype(np.float32)
        zero = input_of(node, 2)
        if zero is not None and self.array(zero).any():
            raise SpecError(
                f"weight {codes.name!r}",
                "has a zero point, and LiteRT's weights have none",
                "leave weights.symmetric out, or set it to true",
            )
        axis = node.attributes.get_int("axis", 1) % max(1, array.ndim)
        return Weight(array, scale.reshape(-1), axis if scale.size > 1 else 0)

    def _folded(self, value: ir.Value) -> Weight | None:
        """Return what an operator makes of constants alone; ``None`` where it does not."""
        node = value.producer()
        row = operator(node)
        if node is None or not node.inputs or len(node.outputs) > 1:
            return None
        if row.random or row.family == "control" or node.domain not in DEFAULT_DOMAINS:
            return None
        if value not in self._made:
            given = {v.name or "": self.weight(v) for v in node.inputs if v is not None}
            arrays = {name: w.floats for name, w in given.items() if w is not None}
            made = None
            if len(arrays) == len(given):
                results: Any = ReferenceEvaluator(ir.to_proto(node)).run(None, arrays)
                made = Weight(results[0])
            self._made[value] = made
        return self._made[value]

    def array(self, value: ir.Value | None) -> Array:
        """Return a constant's value."""
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
            axis = 0 if weight.scale is None else weight.axis + missing
            weight = Weight(array, weight.scale, axis)
            weight = weight.turned(forth(array.ndim))
        else:
            last = False
        if weight.scale is None:
            return self.dequantized(self.stored(weight.array, name, last=last))
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
        array = np.asarray(array, order="C")  # and not a row of one from a scalar
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        scales = b"" if quantization is None else quantization.scale.tobytes()
        content = blake2b(array.reshape(-1).view(np.uint8).data).digest()
        own = name if self.planned else ""  # what is not known yet is not the same
        key = (array.dtype.name, array.shape, content, scales, last, own)
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

    @property
    def counted(self) -> ir.Value | None:
        """An input whose first axis is that of samples, if there is one."""
        return next((v for v in self.model.graph.inputs if shape_of(v)[:1] == (-1,)), None)

    def zeros_for_samples(self, shape: Sequence[int]) -> Tensor:
        """Return a zero for each sample: their number is that of an input.

        Args:
            shape: -1 at the axis of samples, 1 at all others.
        """
        value = self.counted
        assert value is not None
        source = self.typed(self.tensor(value, last=False), "float32")
        cut = schema.StridedSliceOptionsT(beginMask=1, endMask=1)
        axes = len(source.shape)
        ends = [self.numbers(x) for x in ([0] * axes, [1] * axes, [1] * axes)]
        first = self.emit(
            "STRIDED_SLICE", [source, *ends], (-1,) + (1,) * (axes - 1), "float32", cut
        )
        first = self.reshaped(first, shape)
        return self.emit("SUB", [first, first], shape, "float32", schema.SubOptionsT())

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
        """Return codes and halves as floats; what holds floats already as it is."""
        if tensor.quantization is None and tensor.dtype != _HALF:
            return tensor
        if tensor.index not in self._floats:
            self._floats[tensor.index] = self.emit(
                "DEQUANTIZE", [tensor], tensor.shape, "float32", None, tensor.last, "floats"
            )
        return self._floats[tensor.index]

    def typed(self, tensor: Tensor, dtype: str) -> Tensor:
        """Return a tensor's elements in a type."""
        if tensor.dtype == dtype:
            return tensor
        options = schema.CastOptionsT(
            inDataType=getattr(schema.TensorType, tensor.dtype.upper()),
            outDataType=getattr(schema.TensorType, dtype.upper()),
        )
        return self.emit("CAST", [tensor], tensor.shape, dtype, options, tensor.last)

    def reshaped(self, tensor: Tensor, shape: Sequence[int], last: bool = False) -> Tensor:
        """Return the same elements in another shape."""
        options = schema.ReshapeOptionsT(newShape=np.array(shape, np.int32))
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
        SpecError: two axes have no fixed length, or one that is not that of samples.
    """
    shape = dims(value, symbolic=-1)
    free = () if shape is None else [axis for axis, length in enumerate(shape) if length < 0]
    if shape is None or len(free) > 1 or (value.is_graph_input() and any(free)):
        given = "no known shape" if value.shape is None else f"the shape {axes_of(value.shape)}"
        raise SpecError(
            f"value {value.name!r}",
            f"has {given}; in a LiteRT file only the axis of samples may have any length",
            "give the inputs fixed lengths, all but the first: a network in Python by "
            "model.inputs, an ONNX file where it is exported",
        )
    return shape


def axes_of(shape: ir.Shape) -> str:
    """Return a shape as specs have it, such as ``[batch, 3, height, 8]``."""
    lengths = (axis if isinstance(axis, int) else axis.value or "?" for axis in shape)
    return f"[{', '.join(map(str, lengths))}]"


def type_of(value: ir.Value) -> str:
    """Return the name of a value's type; codes are int8 in the file, whatever it is.

    Halves are computed as float32: most kernels for CPUs have no others, and those that have may
    compute float32 in halves if they are told to.
    """
    kind = own_type(value)
    return "float32" if kind == _HALF else kind


def own_type(value: ir.Value) -> str:
    """Return the name of a value's type as the model has it."""
    return "float32" if value.dtype is None else value.dtype.numpy().name


def turned(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with its channels last."""
    if len(shape) < _TURNED:
        return tuple(shape)
    return tuple(shape[axis] for axis in forth(len(shape)))


def forth(rank: int) -> list[int]:
    """Return the order of axes that puts the second last."""
    return [0, *range(2, rank), 1]


def back(rank: int) -> list[int]:
    """Return the order of axes that puts the last second."""
    return [0, rank - 1, *range(1, rank - 1)]
