"""The layers whose inputs a removal changes, and where what is solved of them can go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.blocks import values_read
from compressor.graph.channels.slicing import Kept
from compressor.graph.layers import activation_input, is_bias, with_bias
from compressor.graph.operators import operator
from compressor.graph.values import constant_of, sole_reader
from compressor.models.element_types import tensor_of
from compressor.models.layer_uses import nodes_of
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.maths.places import Window
from compressor.run.weight_pass import FLOATS
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, Units
from compressor.types.layers import Layer

_EPSILON = 1e-5  # ONNX's default


class Shift(NamedTuple):
    """A parameter that takes over a change of a layer's bias."""

    parameter: str
    sign: float


class Bounds(NamedTuple):
    """Beyond which an activation is constant; between them it is the identity."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Consumer:
    """A layer whose inputs are not what they were: some are gone, or come from layers like it.

    Attributes:
        input: the value that it multiplies with its weight.
        window: what it sees of it, if it is a convolution.
        kept: its outputs that remain, of those that it had; ``None`` if all do.
        shift: what takes over a change of its bias, if something can.
        beside: the value that is added to its output, as by a shortcut, if there is one.
        end: the sum of the two; without one, what its output becomes by the last of the steps.
        steps: nodes that its output goes through before, each an affine function of each row.
        bounds: between which what comes then passes an activation unchanged, and beyond which its
            value makes no difference; ``None`` if none follows that does so.
    """

    layer: Layer
    node: ir.Node
    input: str
    window: Window | None
    kept: Units | None
    shift: Shift | None
    beside: str | None
    end: str
    steps: tuple[ir.Node, ...]
    bounds: Bounds | None

    def scale(self) -> Tensor:
        """Return what its output is multiplied with on its way, float64 ``[rows]``; reads them."""
        return self._affine()[0]

    def offset(self) -> Tensor:
        """Return what is added to that on its way, float64 ``[rows]``; reads them."""
        return self._affine()[1]

    def _affine(self) -> tuple[Tensor, Tensor]:
        scale = torch.ones(self.layer.rows, dtype=torch.float64)
        offset, value = torch.zeros_like(scale), self.node.outputs[0]
        for step in self.steps:
            factor, added = torch.ones(()), torch.zeros(())
            if operator(step).running_statistics:
                gain, shift, mean, variance = map(_numbers, step.inputs[1:5])
                epsilon = step.attributes.get_float("epsilon", _EPSILON)
                factor = gain / (variance + epsilon).sqrt()
                added = shift - mean * factor
            else:
                constant = _numbers(next(v for v in step.inputs if v is not value)).reshape(-1)
                if operator(step).arithmetic == "*":
                    factor = constant
                else:
                    added = constant
            scale, offset, value = scale * factor, offset * factor + added, step.outputs[0]
        return scale, offset


def find_consumers(
    model: ir.Model, kept: Kept, owned: Collection[str]
) -> tuple[tuple[Consumer, ...], dict[str, str]]:
    """Return the layers that have lost inputs, in the order of execution; reads structure only.

    Args:
        model: the model without its removed channels.
        kept: the positions that remain of parameters' axes.
        owned: names of the parameters that can be changed.

    Returns:
        Those that can be solved, and why others cannot, by layer name.
    """
    consumers, reasons = [], {}
    for layer, node in nodes_of(model).values():
        if not _loses(layer, kept):
            continue
        reason = _obstacle(layer, node, owned)
        if (
            not reason and layer.groups > 1
        ):  # it is solved by group, and has no moment of all inputs
            reason = "it is computed in groups"
        if reason:
            reasons[layer.name] = reason
        else:
            consumers.append(_consumer(layer, node, kept, owned))
    return tuple(consumers), reasons


def changed_layers(
    model: ir.Model, kept: Kept, owned: Collection[str], stand_ins: Collection[str] = ()
) -> tuple[Consumer, ...]:
    """Return the layers that can be solved and that do not give what they gave.

    They have lost inputs, read what such layers give, or end in the sum before a dropped block.
    The order and the other arguments are those of :func:`find_consumers`.

    Args:
        stand_ins: names of the values that stand for what dropped blocks gave.
    """
    found, changed = [], {*stand_ins}
    layers = {node: layer for layer, node in nodes_of(model).values()}
    for node in model.graph:
        moved = not changed.isdisjoint(v.name or "" for v in values_read(node))
        if (layer := layers.get(node)) is not None:
            moved = moved or _loses(layer, kept)
            if not _obstacle(layer, node, owned):
                consumer = _consumer(layer, node, kept, owned, stand_ins)
                moved = moved or consumer.end in changed
                found += [consumer] if moved else []
        if moved:
            changed.update(v.name or "" for v in node.outputs)
    return tuple(found)


def changeable(carrier: Carrier) -> frozenset[str]:
    """Return the names of the tensors that can be changed, weights of parametrizations included."""
    computed = carrier.computed_weights if isinstance(carrier, TorchCarrier) else frozenset()
    return computed.union(carrier.tensors())


def _loses(layer: Layer, kept: Kept) -> bool:
    """Whether some of a layer's inputs are gone."""
    return bool(kept.get(layer.weight, {}).keys() - {layer.output_axis})


def possible_consumers(
    carrier: Carrier, groups: Iterable[ChannelGroup], *, changed: bool = False
) -> tuple[tuple[Consumer, ...], dict[str, str]]:
    """Return the layers that lose inputs if any unit of some groups goes; see above.

    Args:
        changed: return all that can be solved and that this changes.
    """
    read: dict[str, dict[int, Units]] = {}
    for group in groups:
        for member in group.members:
            if member.role == "input":
                read.setdefault(member.parameter, {})[member.axis] = group.units
    graph, owned = carrier.graph(), changeable(carrier)
    consumers, reasons = find_consumers(graph, read, owned)
    return changed_layers(graph, read, owned) if changed else consumers, reasons


def _obstacle(layer: Layer, node: ir.Node, owned: Collection[str]) -> str:
    """Return why a layer cannot be solved; empty if it can."""
    value, weight = activation_input(node), node.inputs[operator(node).weight]
    attributes = node.attributes
    if layer.is_transposed_convolution or layer.is_recurrent:
        return f"{layer.kind} is not solved"
    if layer.dtype not in FLOATS:
        return f"its weight is {layer.dtype}"
    if weight is None or layer.weight not in owned:
        return "its weight is no parameter of the model"
    if value is None or not value.name:
        return "its input is constant"
    if len(_source(weight).uses()) > 1 or len(weight.uses()) > 1:
        return (
            "its weight is read at several places; if a module is called several times, as in "
            "siamese networks, compress it alone"
        )
    if attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return "its padding depends on its input"
    scaled = {attributes.get_float(name, 1.0) for name in ("alpha", "beta")} != {1.0}
    if scaled or attributes.get_int("transA", 0) != 0:
        return "its product is scaled or transposed"
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return "" if bias is None or bias.is_initializer() else "its bias is computed"


def _source(value: ir.Value) -> ir.Value:
    """Return the initializer behind a weight that is transposed on its way."""
    while not value.is_initializer() and (node := value.producer()) is not None:
        assert node.inputs[0] is not None
        value = node.inputs[0]
    return value


def _consumer(
    layer: Layer,
    node: ir.Node,
    kept: Kept,
    owned: Collection[str],
    stand_ins: Collection[str] = (),
) -> Consumer:
    value = activation_input(node)
    assert value is not None
    shift = None
    _, bias = with_bias(node, layer)
    if bias is not None and bias.name in owned and is_bias(bias, layer) and len(bias.uses()) == 1:
        shift = Shift(bias.name or "", 1.0)
    path = _path(node, layer, stand_ins)
    mean = next((n.inputs[3] for n in path.steps if operator(n).running_statistics), None)
    if shift is None and mean is not None and mean.name in owned and len(mean.uses()) == 1:
        shift = Shift(mean.name or "", -1.0)
    return Consumer(
        layer=layer,
        node=node,
        input=value.name or "",
        window=_window(layer, node),
        kept=kept.get(layer.weight, {}).get(layer.output_axis),
        shift=shift,
        beside=path.beside,
        end=path.end.name or "",
        steps=path.steps,
        bounds=_bounds(path.end) if path.even else None,
    )


def _window(layer: Layer, node: ir.Node) -> Window | None:
    if not layer.is_convolution:
        return None
    kernel = layer.shape[2:]
    ones, none = (1,) * len(kernel), (0,) * (2 * len(kernel))

    def given(name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(node.attributes.get_ints(name, default))

    return Window(kernel, given("strides", ones), given("pads", none), given("dilations", ones))


class _Path(NamedTuple):
    """What becomes of a layer's output until something else is added to it.

    Attributes:
        even: all that is added on the way is one number a row.
    """

    end: ir.Value
    beside: str | None = None
    steps: tuple[ir.Node, ...] = ()
    even: bool = True


def _path(node: ir.Node, layer: Layer, stand_ins: Collection[str]) -> _Path:
    """Follow a layer's output through what scales and moves its channels, but not beyond a
    value that stands for another.
    """
    path = _Path(node.outputs[0])
    while path.end.name not in stand_ins and (reader := sole_reader(path.end)) is not None:
        row = operator(reader)
        others = [v for v in reader.inputs if v is not None and v is not path.end]
        plain = bool(others) and _by_row(others[0], layer)
        if row.running_statistics and reader.inputs[0] is path.end:
            normed = any(operator(step).running_statistics for step in path.steps)
            if normed or not all(v.is_initializer() for v in others):
                return path
            path = path._replace(steps=(*path.steps, reader))
        elif row.arithmetic in ("*", "+") and plain:
            path = path._replace(steps=(*path.steps, reader))
        elif row.arithmetic == "+" and others:
            if constant_of(others[0]) is None:
                if others[0].shape is None or others[0].shape != path.end.shape:
                    return path
                return path._replace(end=reader.outputs[0], beside=others[0].name)
            path = path._replace(even=False)
        elif row.moves != "same":
            return path
        path = path._replace(end=reader.outputs[0])
    return path


def _bounds(value: ir.Value) -> Bounds | None:
    """Return those of the activation that alone reads a value."""
    reader = sole_reader(value)
    row = operator(reader)
    if row.rectifies:
        return Bounds(0.0, np.inf)
    if reader is None or not row.activation or row.zeros != "bounds":  # a Clip
        return None
    limits = [*reader.inputs[1:3], None, None][:2]
    if any(v is not None and not v.is_initializer() for v in limits):
        return None
    low, high = (None if v is None else float(_numbers(v)) for v in limits)
    return Bounds(-np.inf if low is None else low, np.inf if high is None else high)


def _by_row(value: ir.Value, layer: Layer) -> bool:
    """Whether a constant holds one number for each row of a layer, on the axis of its output."""
    if not value.is_initializer() or value.shape is None:
        return False
    lengths = [d for d in value.shape if isinstance(d, int)]
    behind = len(layer.shape) - 2 if layer.is_convolution else 0
    axis = len(lengths) - 1 - behind
    sizes = np.prod(lengths) if lengths else 1
    return axis >= 0 and lengths[axis] == sizes == layer.rows


def _numbers(value: ir.Value | None) -> Tensor:
    assert value is not None
    return tensor_of(value).to(torch.float64)


def upstream(model: ir.Model, consumers: Sequence[Consumer]) -> Mapping[str, frozenset[int]]:
    """Return for each value the numbers of the consumers that it depends on."""
    numbers = {consumer.node: index for index, consumer in enumerate(consumers)}
    before: dict[str, frozenset[int]] = {}
    for node in model.graph:
        reached = frozenset[int]().union(*(before.get(v.name or "", ()) for v in values_read(node)))
        if node in numbers:
            reached |= {numbers[node]}
        for value in node.outputs:
            before[value.name or ""] = reached
    return before
