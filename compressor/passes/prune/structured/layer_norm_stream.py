"""A residual stream that only layer norms, products and sums touch, so that it can be turned.

Ashkboos et al., SliceGPT, 2024 (arXiv:2401.15024) write a layer norm as an RMS norm behind a
product that takes off the mean, so the network loses its class. Here the turn leaves the mean over
channels alone: a layer norm commutes with it as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.graph.blocks import values_read
from compressor.graph.channels.analysis import Analysis, analyse
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.values import is_op
from compressor.passes.prepare.maths.rotation import DenseRotation, components_beside_mean
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, kept

SUBJECT = "criterion principal-components"
_NORM = "LayerNormalization"
_MOVES = ("same", "type", "shape", "order", "some")
_JOINED = ("parts", "repeated")  # what makes zeros of an output of those of its inputs
_WHOLE = ("Dropout", "ReduceMean")
"""Operators that move vectors of channels, or average them, beside those whose rows say so."""
_BEHIND = "takes what a norm gives: norms lie behind the sums, not before"


class Norm(NamedTuple):
    """The parameters of a layer norm; ``shift`` is empty if it has none."""

    scale: str
    shift: str


@dataclass(frozen=True, eq=False)
class LayerNormStream:
    """The channels of a residual stream that layer norms read, and what lies on them.

    Attributes:
        group: the channels.
        written: the parameters that write to the stream, and the axis of each on which channels
            lie.
        read: the parameters that read what a norm makes of it, and that axis.
        norms: what each of these reads from.
    """

    group: ChannelGroup
    written: Mapping[str, int]
    read: Mapping[str, int]
    norms: Mapping[str, Norm]

    def turned(self, carrier: Carrier, turn: DenseRotation) -> Carrier:
        """Return a network that computes the same with its stream turned.

        The scales of norms go into the layers that read from them. So do their shifts: what a norm
        gives has no mean over channels but that of its shift. So the shift becomes 1, and the mean
        of each row of a reader what the shift gave.

        Args:
            turn: leaves the mean over channels alone.
        """
        tensors = carrier.tensors()

        def read(name: str) -> Tensor:
            return tensors[name].read().to(torch.float64)

        changes = {name: read(name) for name in {**self.written, **self.read}}
        for name, axis in self.written.items():
            changes[name] = turn.times(changes[name].movedim(axis, -1)).movedim(-1, axis)
        for name, axis in self.read.items():
            norm, rows = self.norms[name], changes[name].movedim(axis, -1)
            scaled = rows * read(norm.scale)
            if norm.shift:
                scaled = _with_sums(scaled, (rows @ read(norm.shift))[..., None])
            changes[name] = turn.times(scaled).movedim(-1, axis)
        for norm in self.norms.values():
            for name in filter(None, (norm.scale, norm.shift)):
                changes[name] = torch.ones(tensors[name].shape)
        return carrier.with_weights(
            {name: new.to(tensors[name].dtype).contiguous() for name, new in changes.items()}
        )

    def components(self, moment: Tensor) -> tuple[DenseRotation, Tensor]:
        """Return the turn to principal components, and each channel's share of the power then.

        The first component takes two channels, each of which is given all of its share.
        """
        turn, powers = components_beside_mean(moment)
        return turn, powers / powers[1:].sum()

    def restored(
        self, whole: Carrier, smaller: Carrier, channels: ChannelMap, removed: Flags
    ) -> dict[str, Tensor]:
        """Return what makes up for the shorter mean of squares, and of shifts, by name.

        Args:
            whole: turned, before channels were removed.
            smaller: after that.
            channels: of ``whole``.
        """
        length = len(self.group.units)
        left = int((~removed[self.group.units]).sum())
        before, after = whole.tensors(), smaller.tensors()
        changes = {}
        for name, axis in self.read.items():
            norm = self.norms[name]
            shape, dtype = after[norm.scale].shape, after[norm.scale].dtype
            changes[norm.scale] = torch.full(shape, (length / left) ** 0.5, dtype=dtype)
            if not norm.shift:
                continue
            sums = before[name].read().to(torch.float64).sum(axis, keepdim=True)
            for other, units in enumerate(channels.parameters[name]):
                if units is not None and other != axis:
                    remaining = np.flatnonzero(kept(units, removed))
                    sums = sums.index_select(other, torch.from_numpy(remaining))
            rows = after[name].read().to(torch.float64).movedim(axis, -1)
            new = _with_sums(rows, sums.movedim(axis, -1)).movedim(-1, axis)
            changes[name] = new.to(after[name].dtype).contiguous()
        return changes


def _with_sums(rows: Tensor, sums: Tensor) -> Tensor:
    """Return rows ``[..., n]`` with another sum each, ``[..., 1]``, and the same differences."""
    return rows - rows.mean(-1, keepdim=True) + sums / rows.shape[-1]


def layer_norm_stream(carrier: Carrier) -> LayerNormStream | None:
    """Return the stream of a network's layer norms; ``None`` if it has no layer norm.

    Raises:
        SpecError: there are several, or something else computes with its channels.
    """
    graph = carrier.graph()
    if not any(is_op(node, _NORM) for node in graph.graph):
        return None
    analysis = analyse(graph)
    groups = [group for group in analysis.channels.groups if group.mixed == _NORM]
    if len(groups) != 1:
        raise _refused(f"layer norms read {len(groups)} streams, and one can be turned")
    return _Walk(analysis, groups[0], carrier.tensors().keys()).found(graph)


def _refused(why: str, remedy: str = "") -> SpecError:
    other = "choose another criterion, such as reconstruction"
    problem = f"cannot turn the residual stream: {why}"
    return SpecError(SUBJECT, problem, f"{remedy}; or {other}" if remedy else other)


Tag: TypeAlias = Norm | Literal["stream", "parameter"]
"""What a value with the stream's channels is: what a norm makes of it, itself, or a constant."""


class _Walk:
    """Follows a stream through a graph."""

    def __init__(self, analysis: Analysis, group: ChannelGroup, owned: Collection[str]):
        self._analysis, self._group, self._owned = analysis, group, owned
        self._tags: dict[str, Tag] = {}
        self._layers: dict[str, Norm | None] = {}  # by weight, what it reads from

    def found(self, graph: ir.Model) -> LayerNormStream:
        """Return the stream.

        Raises:
            SpecError: something else computes with its channels.
        """
        parameters = [name for name in graph.graph.initializers if self._axes(name)]
        self._tags.update(dict.fromkeys(parameters, "parameter"))
        for node in graph.graph:
            if any(value.name in self._tags for value in values_read(node)):
                self._step(node)
        return self._stream()

    def _stream(self) -> LayerNormStream:
        written, read = dict[str, int](), dict[str, int]()
        for member in self._group.members:
            if member.role == "input":
                read[member.parameter] = member.axis
            elif member.role not in ("norm-scale", "norm-shift"):
                written[member.parameter] = member.axis
        norms = {weight: norm for weight, norm in self._layers.items() if norm is not None}
        met = {*written, *read, *(n for norm in norms.values() for n in norm if n)}
        if odd := sorted((met - {*self._owned}) | ({*read} ^ {*norms}) | ({*read} & {*written})):
            raise _refused(f"{odd[0]!r} is no parameter that lies on it once")
        return LayerNormStream(self._group, written, read, norms)

    def _axes(self, name: str) -> list[int]:
        """Return the axes of a value on which the stream lies."""
        axes = enumerate(self._analysis.axes.get(name, ()))
        return [i for i, x in axes if x is not None and np.isin(x, self._group.units).any()]

    def _step(self, node: ir.Node) -> None:
        layer, row = layer_of(node), operator(node)
        tags = [self._tags.get(v.name or "") for v in values_read(node)]
        moving: set[Tag] = {tag for tag in tags if tag is not None and tag != "parameter"}
        normed = {tag for tag in moving if tag != "stream"}
        if layer is not None and layer.weight in self._tags:
            reads = next((tag for tag in normed if isinstance(tag, Norm)), None)
            if "stream" in moving:
                raise _met(node, "reads it without a norm")
            if self._layers.setdefault(layer.weight, reads) != reads:
                raise _refused(
                    f"{layer.weight!r} is the weight of two layers, and the scales of a norm go "
                    "into one of them alone",
                    "give each a weight of its own: of tied embeddings, copy that of the output "
                    "layer, set tie_word_embeddings: false in the configuration, and save both",
                )
            self._put(node, "stream")
        elif is_op(node, _NORM):
            self._norm(node, normed)
        elif row.arithmetic == "+":
            if normed:
                raise _met(node, _BEHIND)
            if None in tags:
                raise _met(node, "adds the same to all its channels")
            self._put(node, "stream" if moving else "parameter")
        elif row.moves in _MOVES or row.zeros in _JOINED or _picks(node) or is_op(node, *_WHOLE):
            if len({*tags} - {None}) > 1 and normed:
                raise _met(node, "joins it before a norm and behind one")
            self._put(node, next(iter(moving), "parameter"))
        else:
            raise _met(node, "computes with its channels")

    def _norm(self, node: ir.Node, normed: Collection[Tag]) -> None:
        value, scale, shift = (*node.inputs, None)[:3]
        assert value is not None
        axes = self._axes(value.name or "")
        rank = len(self._analysis.axes.get(value.name or "", ()))
        if normed:
            raise _met(node, _BEHIND)
        if scale is None:
            raise _met(node, "has no scale")
        if axes != [rank - 1] or node.attributes.get_int("axis", -1) not in (-1, rank - 1):
            raise _met(node, "does not normalize its channels alone")
        self._put(node, Norm(scale.name or "", "" if shift is None else shift.name or ""))

    def _put(self, node: ir.Node, tag: Tag) -> None:
        """Tag the outputs on which the stream lies."""
        for value in node.outputs:
            name = value.name or ""
            for axis in self._axes(name):
                units = self._analysis.axes[name][axis]
                if units is None or not np.array_equal(units, self._group.units):
                    raise _met(node, "moves some of its channels alone")
                self._tags[name] = tag


def _met(node: ir.Node, problem: str) -> SpecError:
    return _refused(f"{node.op_type} {node.name!r} {problem}")


def _picks(node: ir.Node) -> bool:
    """Return whether a node hands on parts of what it reads."""
    row = operator(node)
    return row.is_table or (len(node.outputs) > 1 and row.passes_factor)
