"""Convolutions of sequences in the form of those of images, for which runtimes have kernels."""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import onnx_ir as ir

from compressor.exporters.onnx.matmul_nbits import replaced
from compressor.graph.editing import Chain, Editor
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.sequences import filling, gains_as_image
from compressor.graph.values import (
    all_nodes,
    constant_array,
    input_of,
    is_op,
    sole_reader,
    static_shape,
)
from compressor.types.tensors import Array

_AXIS = 2  # of the one row
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
_TWO = {"kernel_shape": 1, "strides": 1, "dilations": 1}


def as_images(editor: Editor) -> bool:
    """Give sequences one row where a convolution of floats gains; return whether any does.

    Between convolutions, and the activations that they compute along, the row stays.
    """
    taken = dict[ir.Node, tuple[ir.Value, int]]()
    for node in all_nodes(editor.model.graph):
        layer, places = layer_of(node), _places(node)
        if layer is None or not gains_as_image(layer, places) or not _reads_floats(node):
            continue
        stored = _stored(node.inputs[1])
        if stored is not None and stored.name in editor.model.graph.initializers:
            taken[node] = stored, filling(layer, places) if layer.groups == 1 else 0
    images = _Images(editor)
    for node, (stored, zeros) in taken.items():
        if all(taken.get(use.node) == (stored, zeros) for use in _weight(node).uses()):
            images.change(node, stored, zeros)
    images.tidy()
    return bool(images.rows)


def _places(node: ir.Node) -> int | None:
    shape = static_shape(node.outputs[0])
    return None if shape is None else prod(shape[_AXIS:])


def _weight(node: ir.Node) -> ir.Value:
    weight = node.inputs[1]
    assert weight is not None
    return weight


def _reads_floats(node: ir.Node) -> bool:
    data = node.inputs[0]
    if data is None or data.dtype not in (None, ir.DataType.FLOAT):
        return False
    return not operator(data.producer()).dequantizes


def _stored(weight: ir.Value | None) -> ir.Value | None:
    """Return a weight of floats, or the bytes that it is decoded from."""
    node = None if weight is None else weight.producer()
    if weight is None or weight.is_graph_input() or weight.is_graph_output():
        return None
    if node is None:
        return weight if weight.dtype == ir.DataType.FLOAT else None
    codes, scale = (*node.inputs[:2], None, None)[:2]
    if not operator(node).dequantizes or codes is None or scale is None:
        return None
    by_row = not node.attributes.get_int("axis", 1) or not static_shape(scale)
    if node.attributes.get_int("block_size", 0) or not by_row or codes.dtype not in _BYTES:
        return None
    return codes if sole_reader(codes) is node else None


class _Images:
    def __init__(self, editor: Editor):
        self._editor = editor
        self._weights: set[ir.Value] = set()
        self.rows: dict[tuple[object, ir.Value], ir.Value] = {}
        """For a sequence, the image that holds it, in the graph or branch that made the image."""
        self._dropped: list[ir.Node] = []

    def change(self, node: ir.Node, stored: ir.Value, zeros: int = 0) -> None:
        """Let a convolution read and write images.

        Args:
            stored: the initializer that its weight is, or is decoded from.
            zeros: channels to join to what it reads.
        """
        data = node.inputs[0]
        assert data is not None
        here = (node.graph, data)
        if here not in self.rows:
            chain = Chain(self._editor, data.name or "")
            source, axes = self._with_axes(node, data)
            self.rows[here] = chain.add("Unsqueeze", [source, axes], "_row", data.dtype)
            node.prepend(chain.nodes)
        row = self.rows[here]
        node.replace_input_with(0, self._filled(node, row, zeros) if zeros else row)
        self._change_weight(stored, zeros)
        for name, unit in _TWO.items():
            numbers = node.attributes.get_ints(name, None)
            if numbers is not None:
                node.attributes[name] = ir.AttrInt64s(name, [unit, *numbers])
        pads = node.attributes.get_ints("pads", None)
        if pads is not None:
            node.attributes["pads"] = ir.AttrInt64s("pads", [0, pads[0], 0, pads[1]])
        self._restore(node)

    def _axes(self) -> ir.Value:
        return self._editor.shared_constant("row_axis", np.asarray([_AXIS], np.int64))

    def _with_axes(self, node: ir.Node, data: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return what is to get axes, and these: data's own, too, if nothing else reads data."""
        maker = data.producer()
        added = None if maker is None else constant_array(input_of(maker, 1))
        inner = None if maker is None else maker.inputs[0]
        if not is_op(maker, "Unsqueeze") or added is None or inner is None or (added < 0).any():
            return data, self._axes()
        if sole_reader(data) is not node or maker is None or maker.graph is not node.graph:
            return data, self._axes()
        axes = np.sort([*(int(a) + (a >= _AXIS) for a in added.reshape(-1)), _AXIS])
        name = "_".join(["row_axes", *map(str, axes)])
        return inner, self._editor.shared_constant(name, axes.astype(np.int64))

    def _filled(self, node: ir.Node, row: ir.Value, zeros: int) -> ir.Value:
        """Return an image with more channels, all zero."""
        chain = Chain(self._editor, row.name or "")
        pads = np.asarray([0, 0, 0, 0, 0, zeros, 0, 0], np.int64)
        value = self._editor.shared_constant(f"channels_{zeros}", pads)
        filled = chain.add("Pad", [row, value], "_filled", row.dtype)
        node.prepend(chain.nodes)
        return filled

    def _change_weight(self, stored: ir.Value, zeros: int) -> None:
        """Give a stored weight a row, for all that read it, and columns that zeros meet."""
        if stored in self._weights:
            return
        shape = list(static_shape(stored) or ())
        shape.insert(_AXIS, 1)
        shape[1] += zeros
        assert stored.dtype is not None
        uses = tuple(stored.uses())
        changed = replaced(
            self._editor, stored, partial(_with_row, zeros=zeros), stored.dtype, tuple(shape)
        )
        for use in uses:
            use.node.replace_input_with(use.idx, changed)
            if not operator(use.node).is_convolution:
                _add_row(use.node.outputs[0], zeros)
        self._weights.add(stored)

    def _restore(self, node: ir.Node) -> None:
        """Take the row out after the activations that are computed along with a node."""
        value = node.outputs[0]
        shape = value.shape
        _add_row(value)
        reader = sole_reader(value)
        while reader is not None and operator(reader).fused and reader.graph is node.graph:
            value = reader.outputs[0]
            shape = value.shape
            _add_row(value)
            reader = sole_reader(value)
        last = value.producer()
        assert last is not None
        name = value.name or ""
        value.name = self._editor.free_name(f"{name}_row")
        sequence = ir.Value(name=name, type=value.type, shape=shape)
        squeeze = ir.node(
            "Squeeze", [value, self._axes()], outputs=[sequence], name=f"{name}_squeeze"
        )
        ir.convenience.replace_all_uses_with(value, sequence, replace_graph_outputs=True)
        squeeze.replace_input_with(0, value)
        last.append(squeeze)
        self.rows[node.graph, sequence] = value
        self._dropped.append(squeeze)

    def tidy(self) -> None:
        """Remove what takes out a row that nothing wants out."""
        for node in self._dropped:
            output = node.outputs[0]
            if not output.uses() and not output.is_graph_output() and node.graph is not None:
                node.graph.remove(node, safe=True)


def _with_row(array: Array, zeros: int) -> Array:
    filling = [(0, 0), (0, zeros), *[(0, 0)] * (array.ndim - _AXIS)]
    return np.expand_dims(np.pad(array, filling) if zeros else array, _AXIS)


def _add_row(value: ir.Value, zeros: int = 0) -> None:
    if value.shape is not None:
        first, second, *rest = value.shape
        channels = second + zeros if isinstance(second, int) else second
        value.shape = ir.Shape([first, channels, 1, *rest])
