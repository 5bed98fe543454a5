"""Make a quantized graph one of floats: its weights dequantized, its activations not rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ModelError
from compressor.graph.editing import Attributes, Chain, Editor
from compressor.graph.operators import operator, operator_named
from compressor.graph.plain import make_plain
from compressor.graph.stored_weights import CODES, is_quantized
from compressor.graph.values import (
    all_nodes,
    constant_of,
    input_of,
    is_stored,
    origin,
    static_shape,
    value_by_name,
)
from compressor.models.element_types import from_numpy, to_numpy
from compressor.models.executor import GraphModule
from compressor.passes.quantize.cast.integers import with_float_operators
from compressor.passes.quantize.cast.unrounded import read_unrounded

_SUFFIXES = ("_quantized", "_codes")  # that quantizers add to a weight's name


def dequantize(model: ir.Model) -> frozenset[str]:
    """Take quantization out of a graph in place; return the names of weights that were codes.

    Weights are what their codes stand for; they are computed whenever they are read. Activations
    are what was rounded: nothing behind a ``QuantizeLinear`` is rounded any more. Where its lowest
    code stands for zero, quantizers have left out the ReLU before it, and it is put back; so is
    the upper end of ReLU6. Other ends are dropped.

    Inputs and outputs of the model that are codes stay so.

    Raises:
        ModelError: an operator on integers has no form on floats.
    """
    if not is_quantized(model):
        return frozenset()
    unpacked, left = with_float_operators(model)
    if left:
        raise ModelError(
            "the model",
            f"cannot be made one of floats: {left} works on codes in a way that is not known here",
            "start from the float model that was quantized",
        )
    for node in all_nodes(model.graph):
        if operator_named(node.op_type).family == "quantization":
            node.domain = ""  # ONNX Runtime's own form is the same
    _Tables(model).run()
    weights = _Weights(model, unpacked)
    weights.run()
    read_unrounded(model)
    common.RemoveUnusedNodesPass()(model)
    names = weights.rename()
    make_plain(model)
    return names


class _Tables:
    """Makes lookups read rows of floats instead of codes."""

    def __init__(self, model: ir.Model):
        self._model = model
        self._editor = Editor(model)

    def run(self) -> None:
        for node in list(all_nodes(self._model.graph)):
            if operator(node).dequantizes or operator(node).arithmetic == "*":
                self._replace(node)

    def _replace(self, node: ir.Node) -> None:
        lookups = [_lookup(value) for value in node.inputs if value is not None]
        codes = lookups[0]
        if codes is None or codes.inputs[0] is None or codes.inputs[0].dtype not in CODES:
            return
        table, indices = codes.inputs[0], codes.inputs[1]
        assert indices is not None
        alike = all(n is not None and n.inputs[1] is indices for n in lookups)
        chain = Chain(self._editor, node.outputs[0].name or "")
        if alike:
            sides = [n.inputs[0] for n in lookups[1:] if n is not None]
            settings: Attributes = {"axis": 0}
            block = node.attributes.get_int("block_size", 0)
            settings = {"axis": 1, "block_size": block} if block else settings
        elif all(v is None or constant_of(v) is not None for v in node.inputs[1:]):
            sides, settings = list(node.inputs[1:]), {}
        else:
            return
        if operator(node).arithmetic and not alike:
            return
        dtype = _sides_type(sides)
        floats = chain.add("DequantizeLinear", [table, *sides], "_table", dtype, settings)
        floats.shape = table.shape
        rows = chain.add("Gather", [floats, indices], "_rows", dtype)
        rows.shape = node.outputs[0].shape
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], chain.nodes, node.outputs, [rows]
        )


def _sides_type(sides: Sequence[ir.Value | None]) -> ir.DataType:
    """Return the type of the floats that a scale makes of codes."""
    scale = sides[0] if sides else None
    return (None if scale is None else scale.dtype) or ir.DataType.FLOAT


def _lookup(value: ir.Value) -> ir.Node | None:
    """Return the ``Gather`` of rows of a stored table behind a value, if it is one."""
    node = origin(value, lambda n: operator(n).moves in ("same", "type", "shape")).producer()
    if node is None or not operator(node).is_table or node.attributes.get_int("axis", 0) != 0:
        return None
    table = node.inputs[0]
    return node if table is not None and is_stored(table) else None


class _Weights:
    """Folds what is computed of codes alone into initializers of floats."""

    def __init__(self, model: ir.Model, unpacked: Mapping[ir.Value, str]):
        self._model = model
        self._editor = Editor(model)
        self._opset = model.opset_imports.get("", 0)
        self._codes = dict(unpacked)  # values computed of codes, and the codes' name
        self._folded: dict[object, ir.Value] = {}  # the same by what they are computed of

    def run(self) -> None:
        for node in list(all_nodes(self._model.graph)):
            name = self._name_of_codes(node)
            if name:
                self._codes[self._fold(node)] = name

    def rename(self) -> frozenset[str]:
        """Name the weights that are left after their codes; return the names."""
        left, taken = self._model.graph.initializers, set(value_by_name(self._model))
        names = set()
        for value, codes in self._codes.items():
            if left.get(value.name or "") is not value or value.dtype in CODES:
                continue
            base = codes
            for suffix in _SUFFIXES:
                base = base.removesuffix(suffix)
            for name in (base, codes):
                if name not in taken:
                    taken.add(name)
                    value.name = name
                    break
            names.add(value.name or "")
        return frozenset(names)

    def _name_of_codes(self, node: ir.Node) -> str:
        """Return the name of the codes that a node decodes, if it does and all else is constant."""
        row = operator(node)
        first = next((self._codes[v] for v in node.inputs if v in self._codes), "")
        if not all(self._is_constant(v, bool(first) and row.decodes) for v in node.inputs):
            return ""
        inputs = [value for value in node.inputs if value is not None]
        if not inputs:
            return ""
        if row.family == "quantization":
            return first or inputs[0].name or ""
        turns = row.moves in ("order", "same")
        if not first and inputs[0].dtype in CODES and (row.moves == "type" or turns):
            return inputs[0].name or ""
        decodes = row.decodes or row.is_table or row.arithmetic == "+" or turns
        floats = node.outputs[0].dtype
        moved = turns and floats is not None and floats not in CODES
        return first if decodes and not moved else ""

    def _is_constant(self, value: ir.Value | None, fold: bool) -> bool:
        """Whether a value is constant; if allowed, scales that are turned and cast are folded."""
        if value is None or (constant_of(value) is not None and not value.is_graph_input()):
            return True
        node = value.producer()
        if not fold or node is None or not operator(node).decodes:
            return False
        if not all(self._is_constant(v, fold) for v in node.inputs):
            return False
        self._fold(node)
        return True

    def _fold(self, node: ir.Node) -> ir.Value:
        """Put a constant in the place of what a node computes of constants; return it."""
        attributes = tuple((n, str(a.value)) for n, a in sorted(node.attributes.items()))
        key = (node.op_type, attributes, tuple(node.inputs))
        if key in self._folded:
            node.outputs[0].replace_all_uses_with(self._folded[key], replace_graph_outputs=False)
            return self._folded[key]
        tensors = [constant_of(value) for value in node.inputs]
        compute = _result_of(node, tensors, self._opset)
        output = node.outputs[0]
        shape, dtype = _result_shape(node), output.dtype or _result_type(node)
        tensor: ir.TensorProtocol
        if shape is None or dtype is None:
            tensor = compute()
        else:
            tensor = ir.LazyTensor(compute, dtype, ir.Shape(shape))
        value = self._editor.initializer(output.name or "constant", tensor)
        output.replace_all_uses_with(value, replace_graph_outputs=False)
        self._folded[key] = value
        return value


def _result_shape(node: ir.Node) -> tuple[int, ...] | None:
    row, first = operator(node), node.inputs[0]
    same = row.family == "quantization" or row.moves in ("type", "same")
    return static_shape(first if same and first is not None else node.outputs[0])


def _result_type(node: ir.Node) -> ir.DataType | None:
    if operator(node).dequantizes:
        named = node.attributes.get_int("output_dtype", 0)
        return ir.DataType(named) if named else _sides_type(node.inputs[1:])
    zero = input_of(node, 2) if operator(node).quantizes else None
    return None if zero is None else zero.dtype


def _result_of(
    node: ir.Node, tensors: Sequence[ir.TensorProtocol | None], opset: int
) -> Callable[[], ir.TensorProtocol]:
    """Return a function that computes the first output of a node with constant inputs.

    Args:
        tensors: the inputs, ``None`` for one that is left out; read when the function is called.
        opset: of the default domain.
    """
    names = [None if tensor is None else f"i{index}" for index, tensor in enumerate(tensors)]
    inputs = [
        None if t is None else ir.Value(name=n, type=ir.TensorType(t.dtype), shape=_shape(t))
        for n, t in zip(names, tensors, strict=True)
    ]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    copy = ir.node(node.op_type, inputs, attributes, domain=node.domain)
    copy.outputs[0].name, copy.outputs[0].type = "result", node.outputs[0].type
    given = [value for value in inputs if value is not None]
    graph = ir.Graph(given, copy.outputs, nodes=[copy], opset_imports={"": opset}, name="constant")
    model = ir.Model(graph, ir_version=10)

    def computed() -> ir.TensorProtocol:
        values = {
            name: from_numpy(tensor)
            for name, tensor in zip(names, tensors, strict=True)
            if name is not None and tensor is not None
        }
        return ir.Tensor(to_numpy(GraphModule(model)(**values)["result"]))

    return computed


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape(tensor.shape.numpy())
