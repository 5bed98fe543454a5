"""Replace layers of a graph by two that are smaller."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import tensor_adapters
from torch import Tensor

from compressor.graph.editing import Editor
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.types.layers import Layer


@dataclass(frozen=True, eq=False)
class Factors:
    """A layer's weight as a product.

    Attributes:
        layer: the layer, in the graph that is to be changed.
        down: ``[rank, columns]``; what reads the layer's input.
        up: ``[rows, rank]``; what writes its output and adds its bias.
    """

    layer: Layer
    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """How many values lie between the two."""
        return len(self.down)


def factor_names(layer: str, taken: Collection[str]) -> tuple[str, str]:
    """Return the names of the two layers that a layer becomes, ``NAME.down`` and ``NAME.up``.

    Args:
        layer: the layer's name.
        taken: names of the graph's initializers; where a weight's is among them, both names get a
            number.
    """
    number, mark = 0, ""
    while any(f"{layer}.{part}{mark}.weight" in taken for part in ("down", "up")):
        number += 1
        mark = f"_{number}"
    return f"{layer}.down{mark}", f"{layer}.up{mark}"


def sole_path(node: ir.Node, index: int = 1) -> list[ir.Node] | None:
    """Return the views between a layer's weight and its node, the weight's first.

    Returns:
        ``None`` where the weight is computed in another way, or read by others as well.
    """
    path: list[ir.Node] = []
    value = node.inputs[index]
    while value is not None:
        if len(list(value.uses())) != 1 or value.is_graph_output():
            return None
        if value.is_initializer():
            return path[::-1]
        maker = value.producer()
        if maker is None or operator(maker).moves not in ("same", "order"):
            return None
        path.append(maker)
        value = maker.inputs[0]
    return None


def factored(model: ir.Model, factors: Sequence[Factors]) -> tuple[ir.Model, tuple[str, ...]]:
    """Return a copy of a graph in which layers are products of two.

    A convolution becomes one with ``rank`` filters of the same size, strides and pads, and a 1x1
    convolution behind it (E. Denton et al., 2014, arXiv:1404.0736; X. Zhang et al., 2015,
    arXiv:1505.06798). The second layer's node is the old one, so that the output keeps its name.

    Args:
        model: not changed.
        factors: of layers whose weight has a :func:`sole_path`.

    Returns:
        The graph and the names of the new weights.

    Raises:
        KeyError: the graph has no such layer.
    """
    changed = model.clone()
    editor = Editor(changed)
    nodes = {layer.weight: node for layer, node in layers_with_nodes(changed)}
    names: list[str] = []
    for one in factors:
        names += _split(editor, nodes[one.layer.weight], one)
    return changed, tuple(names)


def _split(editor: Editor, node: ir.Node, factors: Factors) -> tuple[str, str]:
    layer, views = factors.layer, sole_path(node)
    assert views is not None, "the layer has a weight of its own"
    swapped = sum(operator(view).moves == "order" for view in views) % 2 == 1
    weight, old = node.inputs[1], editor.model.graph.initializers[layer.weight]
    assert weight is not None
    down_name, up_name = factor_names(layer.name, editor.model.graph.initializers)
    down = _weight(editor, down_name, _stored(layer, factors.down, narrow=False))
    up = _weight(editor, up_name, _stored(layer, factors.up, narrow=True))
    first, second = down, up
    if swapped:
        first, second = (_turned(editor, node, value) for value in (down, up))
    output = node.outputs[0]
    attributes = {name: a.value for name, a in node.attributes.items()}
    if layer.is_linear:
        attributes = {k: v for k, v in attributes.items() if k in ("transA", "transB")}
        node.attributes.pop("transA", None)
    elif layer.is_convolution:
        node.attributes.clear()
        node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [1] * len(layer.shape[2:]))
    narrow = editor.node(node.op_type, [node.inputs[0], first], down_name, output.dtype, attributes)
    narrow.outputs[0].shape = _between(output, 1 if layer.is_convolution else -1, factors.rank)
    node.prepend([narrow])
    node.replace_input_with(0, narrow.outputs[0])
    node.replace_input_with(1, second)
    for view in reversed(views):
        editor.model.graph.remove(view, safe=True)
    editor.release(old)
    return down.name or "", up.name or ""


def _stored(layer: Layer, matrix: Tensor, *, narrow: bool) -> Tensor:
    """Return a factor in the form in which the layer's weight is stored."""
    if layer.is_convolution:
        form = (*matrix.shape, *[1] * len(layer.shape[2:])) if narrow else (-1, *layer.shape[1:])
        return matrix.reshape(form)
    return matrix.T if layer.transposed else matrix


def _weight(editor: Editor, layer: str, tensor: Tensor) -> ir.Value:
    return editor.initializer(f"{layer}.weight", tensor_adapters.TorchTensor(tensor.detach()))


def _turned(editor: Editor, node: ir.Node, value: ir.Value) -> ir.Value:
    """Return the transpose of a weight, computed in front of a node."""
    made = editor.node("Transpose", [value], f"{value.name}.T", value.dtype, {"perm": (1, 0)})
    assert value.shape is not None
    made.outputs[0].shape = ir.Shape(tuple(reversed(value.shape.dims)))
    node.prepend([made])
    return made.outputs[0]


def _between(output: ir.Value, axis: int, rank: int) -> ir.Shape | None:
    """Return the shape of what lies between the two layers."""
    if output.shape is None:
        return None
    lengths = list(output.shape.dims)
    lengths[axis] = rank
    return ir.Shape(lengths)
