"""Fold batch-norm and constant factors and terms into the layer before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import ModelError
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.values import constant_of, input_of, sole_reader, static_shape
from compressor.passes.fuse.affine import Affine, batch_norm, identity
from compressor.passes.fuse.draft import Draft, bypass, rank, replace, wide
from compressor.passes.fuse.halves import is_held
from compressor.types.layers import Layer
from compressor.types.tensors import Array

_SHARED = "another layer reads the same weight"


@dataclass(frozen=True)
class Step:
    """A node that maps every channel affinely, by constants."""

    node: ir.Node
    source: ir.Value  # what it maps
    axis: int | None  # the channel axis; `None` where all channels are treated alike
    name: str
    affine: Callable[[], Affine]  # computes the map
    scales: bool = True  # the map has a factor, not only a term
    shifts: bool = True  # the map has a term


def fold_batch_norm(node: ir.Node, draft: Draft) -> bool:
    """Fold a BatchNormalization into the convolution or linear layer before it.

    One that follows no layer (pre-activation networks) stays: it is a single operator in every
    runtime, while a multiplication and an addition would be two.
    """
    # before opset 9 a batch-norm may train, or normalize every position apart
    step = _batch_norm_step(node) if draft.opset >= 9 else None
    return step is not None and _fold(step, draft)


def fold_affine(node: ir.Node, draft: Draft) -> bool:
    """Fold a multiplication by or an addition of a constant into the layer before it."""
    step = arithmetic_step(node)
    return step is not None and _fold(step, draft)


def _batch_norm_step(node: ir.Node) -> Step | None:
    if not operator(node).running_statistics or len(node.inputs) != 5:
        return None
    if node.attributes.get_int("training_mode", 0) or any(v.uses() for v in node.outputs[1:]):
        return None
    source, parameters = node.inputs[0], [constant_of(v) for v in node.inputs[1:]]
    tensors = [t for t in parameters if t is not None]
    if source is None or len(tensors) != 4:
        return None
    name = _batch_norm_name(node)
    epsilon = node.attributes.get_float("epsilon", 1e-5)

    def affine() -> Affine:
        gamma, beta, mean, variance = (wide(t).reshape(-1) for t in tensors)
        try:
            return batch_norm(gamma, beta, mean, variance, epsilon)
        except ValueError as error:
            raise ModelError(
                f"layer {name!r}", f"{error}", "the checkpoint is damaged; train or export it again"
            ) from error

    return Step(node, source, 1, f"batch-norm {name}", affine)


def _batch_norm_name(node: ir.Node) -> str:
    for value in node.inputs[1:]:
        for part in ("weight", "bias", "running_mean", "running_var"):
            if value is not None and value.name and value.name.endswith(f".{part}"):
                return value.name.removesuffix(f".{part}")
    return node.name or node.outputs[0].name or ""


def arithmetic_step(node: ir.Node) -> Step | None:
    """Return a multiplication by or an addition of a constant, if a node is one."""
    operation = operator(node).arithmetic
    if not operation or len(node.inputs) != 2:
        return None
    first, second = node.inputs
    if operation in ("+", "*") and constant_of(first) is not None:
        first, second = second, first
    tensor = constant_of(second)
    if first is None or second is None or tensor is None or constant_of(first) is not None:
        return None
    if not tensor.dtype.is_floating_point() or first.shape is None:
        return None
    shape = tuple(int(d) for d in tensor.shape.numpy())
    long = [i for i, length in enumerate(shape) if length != 1]
    if len(long) > 1 or len(shape) > len(first.shape):
        return None
    axis = len(first.shape) - len(shape) + long[0] if long else None
    scales = operation in ("*", "/")

    def affine() -> Affine:
        values, none = wide(tensor).reshape(-1), identity()
        if operation == "/":
            values = 1.0 / values
        if scales:
            return Affine(values, none.shift)
        return Affine(none.scale, -values if operation == "-" else values)

    what = f"{node.op_type} {'by' if scales else 'of'} {second.name}"
    return Step(node, first, axis, what, affine, scales, not scales)


def _fold(step: Step, draft: Draft) -> bool:
    target = find_target(step.source, step.node, step.axis, draft)
    if target is None or not _length_fits(step, target):
        return False
    layer, folds = target.layer, [(step, target)]
    if _is_bare(target) and step.shifts and (not step.scales or target.passed):
        return False  # the term is the layer's bias already, or would need a place to go
    if step.scales and target.obstacle == _SHARED:
        folds = _behind_each_reader(step, target, draft)
    if step.scales and (target.obstacle not in ("", _SHARED) or not folds):
        draft.kept(layer.name, f"{step.name} stays: {target.obstacle}")
        return False
    if not is_held(step, target):
        draft.kept(layer.name, f"{step.name} stays: float16 does not hold what it makes")
        return False
    if step.scales:
        scale_weight(step, target, draft)
    old, bias = target.bias, None
    if step.shifts or old is not None:
        bias = set_bias(target, step.affine, draft, shared=len(folds))
    for one, at in folds:
        if bias is not None and at is not target:
            _attach(at, old, bias)
        if _is_bare(at) and step.shifts:
            one.source.name = f"{one.source.name}_folded"
            replace(one.node, "Add", [one.source, bias])
            continue
        for value in at.changed(one.source):
            value.name = f"{value.name}_folded"
        bypass(one.node, one.source)
    draft.did(layer.name, f"fold {step.name}")
    draft.counts[f"{step.name.split()[0]} folded"] += len(folds)
    return True


def _is_bare(target: Target) -> bool:
    """Whether a layer has no bias and no place for one."""
    return target.layer.bias_is_separate and target.bias_node is None


def _behind_each_reader(step: Step, target: Target, draft: Draft) -> list[tuple[Step, Target]]:
    """Return the map behind each layer that reads a weight, as where a module is called twice.

    Returns:
        The layers with their own nodes of the map; nothing if one is followed by another map, or
        has another bias.
    """

    def form(node: ir.Node) -> list[object]:
        constants = [v if constant_of(v) is not None else None for v in node.inputs]
        return [node.op_identifier(), dict(node.attributes), constants]

    def like(at: Target) -> list[object]:
        layer, beta = at.layer, at.node.attributes.get_float("beta", 1.0)
        return [layer.kind, layer.transposed, layer.groups, at.bias, beta, _is_bare(at)]

    found: list[tuple[Step, Target]] = []
    constants = (v for v in step.node.inputs if v is not None and constant_of(v) is not None)
    for node in dict.fromkeys(use.node for use in next(constants).uses()):
        if form(node) != form(step.node):
            continue
        same = _batch_norm_step(node) or arithmetic_step(node)
        at = None if same is None else find_target(same.source, node, same.axis, draft)
        fits = at is not None and at.weight is target.weight and like(at) == like(target)
        if same is not None and at is not None and fits and _length_fits(same, at):
            found.append((same, target if at.node is target.node else at))
    uses = target.weight.uses()
    whole = {at.node for _, at in found} == {u.node for u in uses} and len(found) == len(uses)
    return found if whole else []


def _length_fits(step: Step, target: Target) -> bool:
    if step.axis is None:
        return True
    constants = [v for v in step.node.inputs if v is not None and constant_of(v) is not None]
    return all(prod(static_shape(v) or (0,)) == target.layer.rows for v in constants)


def scale_weight(step: Step, target: Target, draft: Draft) -> None:
    """Multiply each row of a layer's weight by the factors of a map."""
    layer, value = target.layer, target.weight
    old = constant_of(value)
    if old is None or value.dtype is None:
        raise TypeError(f"{layer.weight} is no constant")

    def scaled() -> Array:
        matrix = step.affine().weight(layer.canonical(wide(old)))
        return np.asarray(layer.stored(matrix).numpy())

    value.const_value = draft.promise(scaled, value.dtype, layer.shape, layer.weight)


@dataclass(frozen=True)
class Target:
    """A layer whose output nothing but the map (and what lies between) reads."""

    layer: Layer
    node: ir.Node
    bias_node: ir.Node | None  # the Add behind a MatMul that holds its bias
    # outputs of the transpositions between the layer and the map, last first
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
            return _SHARED
        return ""

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
            layer = _layer(node)
            if layer is not None:
                why = "its output has other readers, so what follows stays apart"
                draft.kept(layer.name, why)
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
        reader = node
        value = next(v for v in node.inputs if v is not None and constant_of(v) is None)
    layer = _layer(node)
    if layer is None or (bias_node is not None and not layer.bias_is_separate):
        return None
    if bias_node is not None and not _is_of(bias_node, layer):
        return None
    count = rank(node.outputs[0])
    last = None if count is None else count - 1
    if axis not in (None, last if layer.bias_is_separate else 1) or not bias_fits(node, layer):
        return None
    return Target(layer, node, bias_node, tuple(passed))


def set_bias(
    target: Target, affine: Callable[[], Affine], draft: Draft, shared: int = 1
) -> ir.Value:
    """Map the layer's bias affinely; a layer without one gets one.

    The bias is stored as a vector. A bias parameter that no other layers read than the ``shared``
    ones that get the result keeps its name; another is called after the layer.
    """
    layer, old = target.layer, target.bias
    tensor = constant_of(old)
    beta = target.node.attributes.get_float("beta", 1.0)

    def mapped() -> Array:
        bias = torch.zeros(layer.rows, dtype=torch.float64)
        if tensor is not None:
            bias = bias + beta * wide(tensor)
        return np.asarray(affine().bias(bias.reshape(-1)).numpy())

    dtype = target.weight.dtype
    if dtype is None:
        raise TypeError(f"the type of {layer.weight!r} is unknown")
    shape = (layer.rows,)
    own = old is not None and len(old.uses()) == shared and not old.is_graph_output()
    reused = own and old in draft.parameters
    if reused and old is not None and old.name:
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
    """Whether a node is ``MatMul(x, W) + vector``."""
    if operator(node).arithmetic != "+":
        return False
    constants = [v for v in node.inputs if constant_of(v) is not None]
    others = [v for v in node.inputs if constant_of(v) is None]
    if len(constants) != 1 or len(others) != 1 or others[0] is None:
        return False
    shape = None if constants[0] is None else static_shape(constants[0])
    return operator(others[0].producer()).bias_is_separate and shape is not None and len(shape) == 1


def _is_of(bias_node: ir.Node, layer: Layer) -> bool:
    """Whether the vector that a node adds leaves the number of a layer's channels as it is."""
    (vector,) = (v for v in bias_node.inputs if v is not None and constant_of(v) is not None)
    return (static_shape(vector) or ()) in ((layer.rows,), (1,))


def bias_fits(node: ir.Node, layer: Layer) -> bool:
    """Whether the layer's bias is absent or a constant for each channel."""
    bias = input_of(node, 2)
    if bias is None:
        return True
    shape = static_shape(bias)
    if constant_of(bias) is None or shape is None:
        return False
    return shape in ((layer.rows,), (1, layer.rows), (1,), ())


def _layer(node: ir.Node) -> Layer | None:
    return layer_of(node) if operator(node).is_product else None
