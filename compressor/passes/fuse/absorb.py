"""Fold batch-norm and constant factors and terms into the layer before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import ModelError
from compressor.graph.operators import operator
from compressor.graph.values import constant_of, is_op, static_shape
from compressor.passes.fuse.draft import Draft, bypass, replace
from compressor.passes.fuse.target import (
    Affine,
    Target,
    batch_norm,
    find_target,
    identity,
    set_bias,
)


@dataclass(frozen=True)
class Step:
    """A node that maps every channel affinely, by constants.

    Attributes:
        node: the node.
        source: what it maps.
        axis: the channel axis; ``None`` where all channels are treated alike.
        name: what to call it.
        affine: computes the map.
        scales: the map has a factor, not only a term.
        shifts: the map has a term.
    """

    node: ir.Node
    source: ir.Value
    axis: int | None
    name: str
    affine: Callable[[], Affine]
    scales: bool = True
    shifts: bool = True


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
    step = _arithmetic_step(node)
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
        gamma, beta, mean, variance = (_wide(t).reshape(-1) for t in tensors)
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


def _arithmetic_step(node: ir.Node) -> Step | None:
    if operator(node).family != "arithmetic" or len(node.inputs) != 2:
        return None
    first, second = node.inputs
    if is_op(node, "Add", "Mul") and constant_of(first) is not None:
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
    scales = is_op(node, "Mul", "Div")
    operation = node.op_type

    def affine() -> Affine:
        values, none = _wide(tensor).reshape(-1), identity()
        if operation == "Div":
            values = 1.0 / values
        if scales:
            return Affine(values, none.shift)
        return Affine(none.scale, -values if operation == "Sub" else values)

    what = f"{operation} by {second.name}" if scales else f"{operation} of {second.name}"
    return Step(node, first, axis, what, affine, scales, not scales)


def _fold(step: Step, draft: Draft) -> bool:
    target = find_target(step.source, step.node, step.axis, draft)
    if target is None or not _length_fits(step, target):
        return False
    layer = target.layer
    bare = layer.bias_is_separate and target.bias_node is None
    if bare and step.shifts and (not step.scales or target.passed):
        return False  # the term is the layer's bias already, or would need a place to go
    if step.scales and not target.weight_is_own:
        draft.kept(layer.name, f"{step.name} stays: {target.obstacle}")
        return False
    if step.scales:
        _scale_weight(step, target, draft)
    if bare and step.shifts:
        bias = set_bias(target, step.affine, draft)
        step.source.name = f"{step.source.name}_folded"
        replace(step.node, "Add", [step.source, bias])
    else:
        if step.shifts or target.bias is not None:
            set_bias(target, step.affine, draft)
        for value in target.changed(step.source):
            value.name = f"{value.name}_folded"
        bypass(step.node, step.source)
    draft.did(layer.name, f"fold {step.name}")
    draft.counts[f"{step.name.split()[0]} folded"] += 1
    return True


def _length_fits(step: Step, target: Target) -> bool:
    if step.axis is None:
        return True
    constants = [v for v in step.node.inputs if v is not None and constant_of(v) is not None]
    return all(prod(static_shape(v) or (0,)) == target.layer.rows for v in constants)


def _scale_weight(step: Step, target: Target, draft: Draft) -> None:
    layer, value = target.layer, target.weight
    old = constant_of(value)
    if old is None or value.dtype is None:
        raise TypeError(f"{layer.weight} is no constant")

    def scaled() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        matrix = step.affine().weight(layer.canonical(_wide(old)))
        return np.asarray(layer.stored(matrix).numpy())

    value.const_value = draft.promise(scaled, value.dtype, layer.shape, layer.weight)


def _wide(tensor: ir.TensorProtocol) -> torch.Tensor:
    return torch.from_numpy(np.array(tensor.numpy(), dtype=np.float64))
