"""Store clustered weights in an ONNX IR graph, and codes narrower than their element type.

A weight ``fc.weight`` becomes codes of the same name, and ``fc.weight_codebook`` with the numbers
that they stand for. ``Cast`` and ``Gather`` look them up; runtimes fold both when they load the
model. Where groups of rows have codebooks of their own, these follow each other in one table, and
``fc.weight_offset`` is the start of each row's codebook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.code_forms import FLOATS, CodeForm, Once, onnx_tensor
from compressor.graph.codes import BITS, checked_opset
from compressor.graph.editing import Chain, Editor
from compressor.graph.operators import operator
from compressor.graph.stored_weights import codebook_lookup
from compressor.graph.values import INTEGER_CODES, all_nodes, constant_array, static_shape
from compressor.types.layers import Layer, QuantizedTensor, Scheme
from compressor.types.tensors import Array


@dataclass(frozen=True)
class Codebook:
    """How the codes of a weight are read.

    Attributes:
        table: the initializer of the numbers, those of all codebooks one after the other.
        offsets: the initializer with the start of each row's codebook; ``None`` where all rows
            share one.
    """

    table: ir.Value
    offsets: ir.Value | None

    @property
    def count(self) -> int:
        """The number of codebooks."""
        return 1 + self._last // self.size

    @property
    def size(self) -> int:
        """The numbers in each codebook."""
        return self._numbers - self._last if self.offsets is not None else self._numbers

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return max(1, (self.size - 1).bit_length())

    def __str__(self) -> str:
        if self.offsets is None:
            return f"cluster{self.bits}/tensor"
        rows = int(np.count_nonzero(self._starts == 0))
        return f"cluster{self.bits}/rows {rows}"

    def zero_codes(self) -> Array:
        """Return the code of zero (-1 if there is none), in a shape that fits the codes."""
        numbers = constant_array(self.table)
        assert numbers is not None
        books = numbers.astype(np.float32).reshape(self.count, self.size)
        by_book = np.where((books == 0).any(1), (books == 0).argmax(1), -1).astype(np.int16)
        if self.offsets is None:
            return by_book.reshape(())
        starts = constant_array(self.offsets)
        assert starts is not None
        codes: Array = by_book[starts // self.size]
        return codes

    @property
    def _numbers(self) -> int:
        return (static_shape(self.table) or (0,))[0]

    @property
    def _starts(self) -> Array:
        starts = None if self.offsets is None else constant_array(self.offsets)
        return np.zeros(1, np.int32) if starts is None else starts

    @property
    def _last(self) -> int:
        return int(self._starts.max(initial=0))


def codebook_of(codes: ir.Value) -> Codebook | None:
    """Return the codebook that an initializer's elements are indices into, or ``None``."""
    table_lookup = codebook_lookup(codes)
    return None if table_lookup is None else Codebook(table_lookup.table, table_lookup.offsets)


def attach_codebook(
    editor: Editor, layer: Layer, scheme: Scheme, compute: Callable[[], QuantizedTensor]
) -> None:
    """Store a weight as codes and a codebook; its readers read the values looked up instead.

    The arguments are those of :func:`compressor.graph.codes.attach_codes`, for a scheme whose
    element is ``codebook``.

    Raises:
        ValueError: the weight cannot be stored so, see :func:`compressor.graph.codes.obstacle`.
    """
    checked_opset(editor.model, layer, scheme)
    quantized, form = Once(compute), CodeForm(layer, scheme)
    weight = editor.model.graph.initializers[layer.weight]
    editor.release(weight)
    before = editor.first_reader(weight)
    shape = ir.Shape(layer.shape)
    codes = editor.initializer(
        layer.weight, quantized.tensor(form.codes, form.code_type, layer.shape)
    )
    dtype = FLOATS[layer.dtype]
    table = editor.initializer(
        f"{layer.weight}_codebook",
        quantized.tensor(
            lambda made: onnx_tensor(_table(made), dtype),
            dtype,
            [scheme.codebooks(layer.rows) << scheme.bits],
        ),
    )
    chain, kind = Chain(editor, layer.weight), ir.DataType.INT32
    place = chain.add("Cast", [codes], "_index", kind, {"to": kind})
    if scheme.granularity == "rows":
        offsets = editor.constant(f"{layer.weight}_offset", _offsets(layer, scheme))
        place = chain.add("Add", [place, offsets], "_place", kind)
    clustered = chain.add("Gather", [table, place], "_clustered", dtype)
    for node in chain.nodes:
        node.outputs[0].shape = shape
    if before is not None:
        before.prepend(chain.nodes)
        weight.replace_all_uses_with(clustered)


def _table(quantized: QuantizedTensor) -> torch.Tensor:
    assert quantized.codebook is not None
    return quantized.codebook.flatten()


def _offsets(layer: Layer, scheme: Scheme) -> Array:
    """Return where each row's codebook begins, in a shape that broadcasts to the stored weight."""
    first = np.arange(layer.rows, dtype=np.int32) // (scheme.group or layer.rows) << scheme.bits
    shape = [1] * len(layer.shape)
    shape[layer.output_axis] = layer.rows
    return first.reshape(shape)


def code_widths(model: ir.Model) -> dict[ir.Value, int]:
    """Return the bits of the codes, and of their zero points, that are stored in a wider type.

    ``DequantizeLinear`` has metadata for it from the pass that made it; codebooks have a length. No
    code is read.
    """
    widths: dict[ir.Value, int] = {}
    for node in all_nodes(model.graph):
        if operator(node).dequantizes and BITS in node.metadata_props:
            for value in (node.inputs[0], *node.inputs[2:]):
                if value is not None and value.is_initializer():
                    widths[value] = int(node.metadata_props[BITS])
    for value in model.graph.initializers.values():
        book = codebook_of(value) if value.dtype in INTEGER_CODES else None
        if book is not None:
            widths[value] = book.bits
    return {
        value: bits
        for value, bits in widths.items()
        if value.dtype in INTEGER_CODES and bits < value.dtype.bitwidth
    }


_PAIRS = {ir.DataType.INT4: ir.DataType.INT2, ir.DataType.UINT4: ir.DataType.UINT2}

_BITS = 2


def narrow(model: ir.Model) -> None:
    """Store codes of at most two bits, which opset 21 holds in four, in two-bit types; in place.

    The result is for readers that ignore the opset. No code is evaluated.
    """
    for codes in model.graph.initializers.values():
        book = codebook_of(codes) if codes.dtype in _PAIRS else None
        if book is not None and book.bits <= _BITS:
            _narrow(codes)
    for node in all_nodes(model.graph):
        if not operator(node).dequantizes or int(node.metadata_props.get(BITS, 0)) != _BITS:
            continue
        for value in (node.inputs[0], *node.inputs[2:]):
            if value is not None:
                _narrow(value)


def _narrow(value: ir.Value) -> None:
    if value.dtype in _PAIRS and value.const_value is not None:
        dtype, tensor = _PAIRS[value.dtype], value.const_value
        lazy = partial(_converted, tensor, dtype)
        value.const_value = ir.LazyTensor(lazy, dtype, _shape(tensor), name=value.name)
        value.type = ir.TensorType(dtype)  # copies of a graph share the type of a value


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    values = np.asarray(tensor.numpy()).astype(np.int8).astype(dtype.numpy())
    return ir.Tensor(values, dtype=dtype)


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape([int(d) for d in tensor.shape.numpy()])
