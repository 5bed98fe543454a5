"""Affine maps of channels: what batch-norm and constant factors do to a layer's parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.values import constant_of, is_op, static_shape
from compressor.passes.fuse.draft import Draft, input_of, rank, sole_reader
from compressor.types.layers import Layer


@dataclass(frozen=True)
class Affine:
    """The map ``y = scale * x + shift`` of every channel.

    Attributes:
        scale: ``[channels]`` or ``[1]``, float64.
        shift: ``[channels]`` or ``[1]``, float64.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def weight(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the weight ``[rows, columns]`` of the layer followed by this map."""
        return matrix * self.scale[:, None]

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias ``[rows]`` of the layer followed by this map."""
        return bias * self.scale + self.shift


def identity() -> Affine:
    """Return the map that changes nothing."""
    return Affine(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


def batch_norm(
    gamma: torch.Tensor,
    beta: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> Affine:
    """Return batch normalization in evaluation mode as an affine map.

    ``y = gamma * (x - mean) / sqrt(variance + epsilon) + beta``, all ``[channels]``, float64
    (S. Ioffe, C. Szegedy, Batch Normalization, 2015, algorithm 2).

    Raises:
        ValueError: ``variance + epsilon`` of a channel is not positive.
    """
    spread = variance + epsilon
    bad = torch.nonzero(~(spread > 0)).flatten()
    if len(bad):
        channel = int(bad[0])
        raise ValueError(f"variance + epsilon is {float(spread[channel]):g} in channel {channel}")
    scale = gamma / torch.sqrt(spread)
    return Affine(scale, beta - mean * scale)


@dataclass(frozen=True)
class Target:
    """A layer whose output nothing but the map (and what lies between) reads.

    Attributes:
        layer: the layer.
        node: its operator.
        bias_node: the Add behind a MatMul that holds its bias.
        passed: outputs of the transpositions between the layer and the map, last first.
    """

    layer: Layer
    node: ir.Node
    bias_node: ir.Node | None
    passed: tuple[ir.Value, ...]

    @property
    def weight(self) -> ir.Value:
        """The value the layer reads as its weight."""
        value = self.node.inputs[1]
        if value is None:
            raise TypeError(f"layer {self.layer.name!r} reads no weight")
        return value

    @property
    def bias(self) -> ir.Value | None:
        """The constant the layer adds."""
        if self.bias_node is None:
            return input_of(self.node, 2)
        return next(v for v in self.bias_node.inputs if constant_of(v) is not None)

    @property
    def obstacle(self) -> str:
        """Why the weight may not be changed; empty if it may."""
        value = self.weight
        if not value.is_initializer():
            return "the weight is quantized or computed"
        if value.is_graph_input() or value.is_graph_output():
            return "the weight is an input or output of the graph"
        if len(value.uses()) != 1:
            return "another layer reads the same weight"
        return ""

    @property
    def weight_is_own(self) -> bool:
        """No other layer would notice if the weight changed."""
        return not self.obstacle

    def changed(self, last: ir.Value) -> list[ir.Value]:
        """Return the values before ``last`` that will mean something else after folding."""
        nodes = [self.node] + ([self.bias_node] if self.bias_node is not None else [])
        values = [node.outputs[0] for node in nodes] + list(self.passed)
        return [value for value in values if value is not last]


def find_target(value: ir.Value, reader: ir.Node, axis: int | None, draft: Draft) -> Target | None:
    """Walk up from a map's input to the layer that writes it.

    Args:
        value: what the map reads.
        reader: the map's node.
        axis: the map's channel axis in ``value``; ``None`` if it treats all channels alike.
        draft: reasons are recorded there.

    Returns:
        The layer, or ``None`` if there is none or it cannot take the map over.
    """
    passed: list[ir.Value] = []
    bias_node: ir.Node | None = None
    while True:
        node = value.producer()
        if node is None or node.graph is not reader.graph:
            return None
        if sole_reader(value) is not reader:
            _explain(node, draft)
            return None
        if operator(node).moves == "order" and bias_node is None:
            perm = node.attributes.get_ints("perm", None)
            if perm is None:
                return None
            axis = None if axis is None else perm[axis]
            passed.append(value)
        elif _is_bias(node) and bias_node is None:
            bias_node = node
        else:
            break
        reader, value = node, _data(node)
    layer = layer_of(node) if operator(node).is_product else None
    if layer is None or (bias_node is not None and not layer.bias_is_separate):
        return None
    if axis not in (None, _channel_axis(node)) or not _bias_fits(node, layer):
        return None
    return Target(layer, node, bias_node, tuple(passed))


def set_bias(target: Target, affine: Callable[[], Affine], draft: Draft) -> ir.Value:
    """Map the layer's bias affinely; a layer without one gets one.

    The bias is stored as a vector. A bias parameter that only this layer reads keeps its name;
    another is called after the layer.
    """
    layer, old = target.layer, target.bias
    tensor = constant_of(old)
    beta = target.node.attributes.get_float("beta", 1.0)

    def mapped() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        bias = torch.zeros(layer.rows, dtype=torch.float64)
        if tensor is not None:
            bias = bias + beta * torch.from_numpy(np.array(tensor.numpy(), dtype=np.float64))
        result = affine().bias(bias.reshape(-1))
        return np.asarray(result.numpy())

    dtype = target.weight.dtype
    if dtype is None:
        raise TypeError(f"the type of {layer.weight!r} is unknown")
    shape = (layer.rows,)
    own = old is not None and old in draft.parameters and len(old.uses()) == 1
    if own and old is not None and not old.is_graph_output() and old.name:
        old.const_value = draft.promise(mapped, dtype, shape, old.name)
        old.shape = ir.Shape(shape)
        value = old
    else:
        name = f"{layer.name}.bias"
        value = draft.initializer(draft.promise(mapped, dtype, shape, name), name)
        draft.parameters.add(value)
    _attach(target, old, value)
    return value


def _attach(target: Target, old: ir.Value | None, value: ir.Value) -> None:
    node = target.bias_node or target.node
    if target.node.attributes.get_float("beta", 1.0) != 1.0:
        target.node.attributes.pop("beta")
    if target.bias_node is not None:
        node.replace_input_with(node.inputs.index(old), value)
    elif not target.layer.bias_is_separate:
        if len(node.inputs) < 3:
            node.resize_inputs(3)
        node.replace_input_with(2, value)


def _is_bias(node: ir.Node) -> bool:
    """Tell whether a node is ``MatMul(x, W) + vector``."""
    if not is_op(node, "Add"):
        return False
    constants = [v for v in node.inputs if constant_of(v) is not None]
    others = [v for v in node.inputs if constant_of(v) is None]
    if len(constants) != 1 or len(others) != 1 or others[0] is None:
        return False
    shape = None if constants[0] is None else static_shape(constants[0])
    return operator(others[0].producer()).bias_is_separate and shape is not None and len(shape) == 1


def _data(node: ir.Node) -> ir.Value:
    return next(v for v in node.inputs if v is not None and constant_of(v) is None)


def _channel_axis(node: ir.Node) -> int | None:
    if operator(node).bias_is_separate:
        count = rank(node.outputs[0])
        return None if count is None else count - 1
    return 1


def _bias_fits(node: ir.Node, layer: Layer) -> bool:
    """Tell whether the layer's bias is absent or a constant for each channel."""
    bias = input_of(node, 2)
    if bias is None:
        return True
    shape = static_shape(bias)
    if constant_of(bias) is None or shape is None:
        return False
    return shape in ((layer.rows,), (1, layer.rows), (1,), ())


def _explain(node: ir.Node, draft: Draft) -> None:
    layer = layer_of(node) if operator(node).is_product else None
    if layer is not None:
        draft.kept(layer.name, "its output has other readers, so what follows stays apart")
