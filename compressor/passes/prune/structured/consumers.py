"""The layers that read removed channels, and where what is solved of them can go."""

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
from compressor.models.element_types import from_numpy
from compressor.models.layer_uses import nodes_of
from compressor.passes.prune.maths.least_squares import Window
from compressor.run.weight_pass import FLOATS
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, Units
from compressor.types.layers import Layer

_EPSILON = 1e-5  # ONNX's default


class Shift(NamedTuple):
    """A parameter that takes over a change of a layer's bias."""

    parameter: str
    sign: float


@dataclass(frozen=True, eq=False)
class Consumer:
    """A layer that has lost inputs.

    Attributes:
        input: the value that it multiplies with its weight.
        window: what it sees of it, if it is a convolution.
        kept: its outputs that remain, of those that it had; ``None`` if all do.
        shift: what takes over a change of its bias, if something can.
        beside: the value that is added to its output, as by a shortcut, if there is one.
        factors: parameters that its output is multiplied with before, one number a row.
        norm: the batch normalization that it goes through before, if there is one.
    """

    layer: Layer
    node: ir.Node
    input: str
    window: Window | None
    kept: Units | None
    shift: Shift | None
    beside: str | None
    factors: tuple[ir.Value, ...]
    norm: ir.Node | None

    def scale(self) -> Tensor:
        """Return what its output is multiplied with on its way, float64 ``[rows]``; reads them."""
        scale = torch.ones(self.layer.rows, dtype=torch.float64)
        for factor in self.factors:
            scale = scale * _numbers(factor).reshape(-1)
        if self.norm is not None:
            gain, variance = (_numbers(self.norm.inputs[place]) for place in (1, 4))
            epsilon = self.norm.attributes.get_float("epsilon", _EPSILON)
            scale = scale * gain / (variance + epsilon).sqrt()
        return scale


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
        lost = kept.get(layer.weight, {}).keys() - {layer.output_axis}
        if not lost:
            continue
        reason = _obstacle(layer, node, owned)
        if reason:
            reasons[layer.name] = reason
        else:
            consumers.append(_consumer(layer, node, kept, owned))
    return tuple(consumers), reasons


def possible_consumers(
    carrier: Carrier, groups: Iterable[ChannelGroup]
) -> tuple[tuple[Consumer, ...], dict[str, str]]:
    """Return the layers that lose inputs if any unit of some groups goes; see above."""
    read: dict[str, dict[int, Units]] = {}
    for group in groups:
        for member in group.members:
            if member.role == "input":
                read.setdefault(member.parameter, {})[member.axis] = group.units
    return find_consumers(carrier.graph(), read, carrier.tensors().keys())


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
        return "its weight is read at several places"
    if layer.groups > 1:
        return "it is computed in groups"
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


def _consumer(layer: Layer, node: ir.Node, kept: Kept, owned: Collection[str]) -> Consumer:
    value = activation_input(node)
    assert value is not None
    shift = None
    last, bias = with_bias(node, layer)
    if bias is not None and bias.name in owned and is_bias(bias, layer) and len(bias.uses()) == 1:
        shift = Shift(bias.name or "", 1.0)
    path = _path(last, layer)
    norm = path.norm
    mean = None if norm is None else norm.inputs[3]
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
        factors=path.factors,
        norm=norm,
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
    """What becomes of a layer's output until something else is added to it."""

    beside: str | None = None
    factors: tuple[ir.Value, ...] = ()
    norm: ir.Node | None = None


def _path(last: ir.Node, layer: Layer) -> _Path:
    """Follow a layer's output, ``last`` with its bias, through what scales its channels."""
    path, value = _Path(), last.outputs[0]
    while (reader := sole_reader(value)) is not None:
        row = operator(reader)
        others = [v for v in reader.inputs if v is not None and v is not value]
        if row.running_statistics and reader.inputs[0] is value and path.norm is None:
            if not all(v.is_initializer() for v in others):
                return path
            path = path._replace(norm=reader)
        elif row.arithmetic == "*" and others and _by_row(others[0], layer):
            path = path._replace(factors=(*path.factors, others[0]))
        elif row.arithmetic == "+" and others:
            if constant_of(others[0]) is None:
                same = others[0].shape is not None and others[0].shape == value.shape
                return path._replace(beside=others[0].name) if same else path
        elif row.moves != "same":
            return path
        value = reader.outputs[0]
    return path


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
    assert value.const_value is not None
    return from_numpy(value.const_value).to(torch.float64)


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
