"""Operators on integers become float ones between ``DequantizeLinear`` and ``QuantizeLinear``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.editing import Attributes, Chain, Editor
from compressor.graph.operators import Codes, operator, operator_named
from compressor.graph.stored_weights import unpacked
from compressor.graph.values import (
    all_nodes,
    constant_array,
    constant_of,
    input_of,
    static_shape,
)
from compressor.passes.quantize.cast.scaled import quantized_as_it_runs, scaled_product
from compressor.types.layers import CONVOLUTION, LINEAR

_FLOAT = ir.DataType.FLOAT
_RUNTIME = "com.microsoft"
_SETTINGS = ("channels_last", "opset")  # of an integer operator, not of its float one
_LSTM_SCALES = (8, 10)  # of the weights for the input and for the state; zero points follow
_LSTM_INPUTS = 8


@dataclass(frozen=True)
class _Form:
    """The float form of an operator on codes, whose name is part of its own.

    Attributes:
        inputs: where codes, their scales and zero points are, in the order of the operator's
            inputs; a number is an input that is taken as it is.
        output: where the output's scale is, and its zero point behind it.
        bias: the input whose scale is the product of the others'.
    """

    inputs: tuple[Codes | int, ...]
    output: int
    bias: int | None = None


_FIRST, _SECOND = Codes(0, 1, 2), Codes(3, 4, 5)
_FORMS: Mapping[str, _Form] = {
    "QLinearConv": _Form((_FIRST, _SECOND), 6, bias=8),
    "QLinearMatMul": _Form((Codes(0, 1, 2, -2), Codes(3, 4, 5, -1)), 6),
    "QGemm": _Form((_FIRST, _SECOND), 7, bias=6),
    "QLinearAdd": _Form((_FIRST, _SECOND), 6),
    "QLinearMul": _Form((_FIRST, _SECOND), 6),
    "QLinearSigmoid": _Form((_FIRST,), 3),
    "QLinearLeakyRelu": _Form((_FIRST,), 3),
    "QLinearSoftmax": _Form((_FIRST,), 3),
    "QLinearAveragePool": _Form((_FIRST,), 3),
    "QLinearGlobalAveragePool": _Form((_FIRST,), 3),
    "QLinearWhere": _Form((0, Codes(1, 2, 3), Codes(4, 5, 6)), 7),
}


def with_float_operators(model: ir.Model) -> tuple[dict[ir.Value, str], str]:
    """Replace operators on integers in place, subgraphs included.

    Their inputs come from ``DequantizeLinear``, and codes that they wrote from ``QuantizeLinear``;
    what a product reads that is quantized as the model runs, it reads unquantized.

    Returns:
        The weights whose codes shared bytes, with the name of these, and an operator on integers
        that is left, with its node's name; empty if there is none.
    """
    writer = _Writer(Editor(model))
    for node in list(all_nodes(model.graph)):
        writer.replace(node)
    common.RemoveUnusedNodesPass()(model)  # what scaled the integers
    return writer.unpacked, next(filter(None, map(_left, all_nodes(model.graph))), "")


def _left(node: ir.Node) -> str:
    row = operator_named(node.op_type)
    quantized = node.op_type.startswith(("QLinear", "QAttention", "QEmbed", "QOrdered", "QMoE"))
    scale = input_of(node, 1) if row.integer else None
    if not (quantized or row.integer or (row.packed and scale is None)):
        return ""
    return f"{node.op_type} in node {node.name!r}"


class _Writer:
    def __init__(self, editor: Editor):
        self._editor = editor
        self.unpacked: dict[ir.Value, str] = {}
        self._numbers: dict[ir.Value, ir.Value] = {}  # without axes, by the value with an axis

    def replace(self, node: ir.Node) -> None:
        """Replace a node if it is one that works on integers, and its scales are constant."""
        row, name = operator(node), node.op_type
        if name == "QLinearConcat":
            triples = [Codes(i, i + 1, i + 2) for i in range(2, len(node.inputs), 3)]
            self._static(node, _Form(tuple(triples), 0))
        elif name in _FORMS:
            self._static(node, _FORMS[name])
        elif row.integer and row.recurrent:
            self._recurrent(node)
        elif row.unscaled and row.layer is not None:
            self._product(node)
        elif name == "DynamicQuantizeMatMul" and node.domain == _RUNTIME:
            self._dynamic(node, node.inputs[0], Codes(1, 2, 3), 4)
        elif name == "MatMulIntegerToFloat" and node.domain == _RUNTIME:
            self._dynamic(node, None, Codes(1, 3, 5), 6)
        elif row.packed:
            self._packed(node)

    def _static(self, node: ir.Node, form: _Form) -> None:
        attributes = node.attributes
        if attributes.get_int("channels_last", 0) or _flattens(node):
            return
        places = [place for place in form.inputs if isinstance(place, Codes)]
        sides = [_input(node, i) for place in places for i in place[1:3]]
        if any(value is not None and constant_of(value) is None for value in sides):
            return
        chain = Chain(self._editor, node.outputs[0].name or "")
        inputs: list[ir.Value | None] = []
        for index, place in enumerate(form.inputs):
            if isinstance(place, int):
                inputs.append(node.inputs[place])
                continue
            axis = place.axis
            if index and node.op_type == "QGemm":
                axis = 0 if attributes.get_int("transB", 0) else 1
            inputs.append(self._floats(chain, node, place._replace(axis=axis)))
        bias = _input(node, form.bias)
        if bias is not None:
            inputs.append(self._bias(chain, node, form, bias))
        kept = {n: a.value for n, a in attributes.items() if n not in _SETTINGS}
        name = node.op_type.removeprefix("Q").removeprefix("Linear")
        result = chain.add(name, inputs, "_float", _FLOAT, kept)
        result.shape = node.outputs[0].shape
        scale, zero = _input(node, form.output), _input(node, form.output + 1)
        if scale is not None:
            codes = [result, self._single(scale), *([self._single(zero)] if zero else [])]
            dtype = ir.DataType.UINT8 if zero is None else zero.dtype
            result = chain.add("QuantizeLinear", codes, "_codes", dtype)
            result.shape = node.outputs[0].shape
        _put(node, chain, result)

    def _floats(self, chain: Chain, node: ir.Node, place: Codes) -> ir.Value:
        codes, scale = node.inputs[place.codes], _input(node, place.scale)
        assert codes is not None
        assert scale is not None
        return self._dequantized(chain, codes, scale, _input(node, place.zero_point), place.axis)

    def _dequantized(
        self, chain: Chain, codes: ir.Value, scale: ir.Value, zero: ir.Value | None, axis: int
    ) -> ir.Value:
        parts = [codes, self._single(scale), *([self._single(zero)] if zero else [])]
        rank = len(codes.shape) if codes.shape is not None else 0
        along = axis + rank if axis < 0 else axis
        settings: Attributes = {"axis": along} if static_shape(parts[1]) else {}
        floats = chain.add("DequantizeLinear", parts, f"_{codes.name}_float", _FLOAT, settings)
        floats.shape = codes.shape
        return floats

    def _single(self, value: ir.Value) -> ir.Value:
        """Return a constant of one element without axes."""
        array = constant_array(value)
        if array is None or array.shape == () or array.size != 1:
            return value
        if value not in self._numbers:
            tensor = ir.tensor(array.reshape(()), dtype=value.dtype)
            self._numbers[value] = self._editor.initializer(f"{value.name}_single", tensor)
        return self._numbers[value]

    def _bias(self, chain: Chain, node: ir.Node, form: _Form, bias: ir.Value) -> ir.Value:
        product = np.array([node.attributes.get_float("alpha", 1.0)], np.float32)
        for place in form.inputs:
            scale = constant_array(_input(node, place.scale)) if isinstance(place, Codes) else None
            product = product if scale is None else product * scale.astype(np.float32).reshape(-1)
        shape = static_shape(bias) or (1,)
        spread = np.broadcast_to(product, shape[-1:]).astype(np.float32)
        held = self._editor.constant(f"{bias.name}_scale", np.ascontiguousarray(spread))
        return self._dequantized(chain, bias, held, None, -1)

    def _product(self, node: ir.Node) -> None:
        """Replace an integer product, and the arithmetic that scales what it writes."""
        source, place, codes = (
            quantized_as_it_runs(node.inputs[0]),
            operator(node).codes,
            node.inputs[0],
        )
        scaled = scaled_product(node, None if source is None else source[1])
        if scaled is None or place is None or codes is None:
            return
        last, scale, other = scaled.floats, scaled.weight, scaled.other
        chain = Chain(self._editor, last.name or "")
        read = source[0] if source else self._dequantized(chain, codes, other, _input(node, 2), 0)
        axis = -1 if scale.size > 1 and operator(node).is_matmul else 0
        zero = _input(node, place.zero_point)
        held = self._editor.constant(f"{last.name}_weight_scale", scale)
        weight = self._weight(chain, node.inputs[1], held, zero, axis)
        kind = LINEAR if operator(node).is_matmul else CONVOLUTION
        kept = {n: a.value for n, a in node.attributes.items()}
        result = chain.add(kind, [read, weight], "_float", _FLOAT, kept)
        if scaled.bias is not None:
            bias = self._editor.constant(f"{last.name}_bias", scaled.bias)
            result = chain.add("Add", [result, bias], "_biased", _FLOAT)
        result.shape = last.shape
        maker = last.producer()
        assert maker is not None
        _put(maker, chain, result)

    def _weight(
        self,
        chain: Chain,
        codes: ir.Value | None,
        scale: ir.Value,
        zero: ir.Value | None,
        axis: int,
    ) -> ir.Value:
        """Return a weight's floats; codes that are turned first are turned as floats."""
        assert codes is not None
        turn = codes.producer()
        if turn is None or operator(turn).moves != "order" or turn.inputs[0] is None or axis == 0:
            return self._dequantized(chain, codes, scale, zero, axis)
        floats = self._dequantized(chain, turn.inputs[0], scale, zero, 0)
        turned = chain.add("Transpose", [floats], "_weight", _FLOAT, _attributes(turn))
        turned.shape = codes.shape
        return turned

    def _dynamic(self, node: ir.Node, source: ir.Value | None, weight: Codes, bias: int) -> None:
        """Replace one of ONNX Runtime's products of what is quantized as the model runs."""
        chain = Chain(self._editor, node.outputs[0].name or "")
        if source is None:
            quantized = quantized_as_it_runs(node.inputs[0])
            given = self._floats(chain, node, Codes(0, 2, 4)) if quantized is None else quantized[0]
            source = given
        floats = self._floats(chain, node, weight._replace(axis=-1))
        result = chain.add("MatMul", [source, floats], "_float")
        added = _input(node, bias)
        if added is not None:
            result = chain.add("Add", [result, added], "_biased")
        result.shape = node.outputs[0].shape
        _put(node, chain, result)

    def _recurrent(self, node: ir.Node) -> None:
        """Replace an integer LSTM; its weights are ``[directions, columns, gates * hidden]``."""
        chain = Chain(self._editor, node.outputs[0].name or "")
        inputs = list(node.inputs[:_LSTM_INPUTS])
        for index, place in zip((1, 2), _LSTM_SCALES, strict=True):
            codes, scale, zero = inputs[index], _input(node, place), _input(node, place + 1)
            assert codes is not None
            assert scale is not None
            turn: Attributes = {"perm": [0, 2, 1]}
            turned = chain.add("Transpose", [codes], f"_{codes.name}_turned", codes.dtype, turn)
            turned.shape = _turned(codes)
            value = chain.add("Cast", [turned], f"_{codes.name}_cast", _FLOAT, {"to": _FLOAT})
            if zero is not None:
                value = chain.add("Sub", [value, self._rows(zero)], f"_{codes.name}_shifted")
            value = chain.add("Mul", [value, self._rows(scale)], f"_{codes.name}_scaled")
            value.shape = turned.shape
            inputs[index] = value
        while inputs and inputs[-1] is None:
            inputs.pop()
        made = ir.node("LSTM", inputs, _attributes(node), num_outputs=len(node.outputs))
        for new, old in zip(made.outputs, node.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
        made.name = node.name
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], [*chain.nodes, made], node.outputs, made.outputs
        )

    def _rows(self, side: ir.Value) -> ir.Value:
        """Return a constant for each direction, or each row of it, as floats along those axes."""
        array = constant_array(side)
        if array is None:
            return side
        columns = array.reshape(len(array), -1, 1).astype(np.float32)
        return self._editor.constant(f"{side.name}_rows", columns)

    def _packed(self, node: ir.Node) -> None:
        """Replace a product with codes that share bytes."""
        given = [_input(node, index) for index in (1, 2, 3)]
        parts = [constant_of(value) for value in given]
        computed = any(v is not None and t is None for v, t in zip(given, parts, strict=True))
        if computed or _input(node, 4) is not None or given[0] is None:
            return
        sizes = {n: node.attributes.get_int(n, 4) for n in ("K", "N", "bits", "block_size")}
        shape = ir.Shape((sizes["K"], sizes["N"]))
        unpack = partial(unpacked, parts, sizes)
        dtype = node.outputs[0].dtype or _FLOAT
        tensor = ir.LazyTensor(
            lambda: ir.tensor(unpack().astype(dtype.numpy()), dtype=dtype), dtype, shape
        )
        weight = self._editor.initializer(f"{given[0].name}_float", tensor)
        self.unpacked[weight] = given[0].name or ""
        chain = Chain(self._editor, node.outputs[0].name or "")
        result = chain.add("MatMul", [node.inputs[0], weight], "_float", dtype)
        bias = _input(node, 5)
        if bias is not None:
            result = chain.add("Add", [result, bias], "_biased", dtype)
        result.shape = node.outputs[0].shape
        _put(node, chain, result)


def _flattens(node: ir.Node) -> bool:
    """Whether a softmax is one over all axes from one on, as it was before opset 13."""
    rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
    old = node.attributes.get_int("opset", 13) < 13
    return old and node.attributes.get_int("axis", -1) not in (-1, rank - 1)


def _turned(value: ir.Value) -> ir.Shape | None:
    """Return a shape with the last two axes swapped."""
    shape = static_shape(value)
    return None if shape is None else ir.Shape((*shape[:-2], shape[-1], shape[-2]))


def _input(node: ir.Node, index: int | None) -> ir.Value | None:
    return None if index is None else input_of(node, index)


def _attributes(node: ir.Node) -> Attributes:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _put(node: ir.Node, chain: Chain, result: ir.Value) -> None:
    """Put nodes in the place of one, whose output keeps its name."""
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], chain.nodes, node.outputs[:1], [result]
    )
