"""Find the channels of a graph that can only be removed together.

Every axis of every value is followed through the graph; where two channels meet in an operator
that needs both, they become one. G. Fang et al., DepGraph: Towards Any Structural Pruning, 2023,
section 3, states the problem for layers and their dependencies; here single channels are followed,
so that concatenations, splits and heads need no rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from compressor.graph.bodies import in_turns
from compressor.graph.channels.flow import Flow, Note, named
from compressor.graph.channels.labels import Family, along, compressed, depends_on
from compressor.graph.channels.rules import rule_of, settings_of
from compressor.graph.channels.zeros import Zeros
from compressor.graph.costs import Sample, at_lengths, node_macs
from compressor.graph.editing import inner_nodes
from compressor.graph.lengths import Lengths
from compressor.types.channels import (
    Activation,
    ChannelGroup,
    ChannelMap,
    FrozenOperator,
    Member,
    Product,
    Units,
)

_NO_SAMPLE: Sample = {}


@dataclass(frozen=True, eq=False)
class Analysis:
    """Channels of a graph, with the details that the slicer needs.

    Attributes:
        channels: the map that passes see.
        axes: for each value, the units along each of its axes; ``None`` for an axis without any.
        placed: by unit, an operator to which the unit's position on its axis matters, though not
            the removal of others.
        flow: what the rules recorded.
    """

    channels: ChannelMap
    axes: Mapping[str, tuple[Units | None, ...]]
    placed: Mapping[int, str]
    flow: Flow


def map_channels(model: ir.Model) -> ChannelMap:
    """Return all channels of a graph, from its structure and small constants alone.

    Example:
        >>> channels = map_channels(carrier.graph())
        >>> [group.name for group in channels.groups if not group.frozen]
        ['conv1', 'layer1.0.conv1']

    Args:
        model: the graph, sorted topologically; not changed.
    """
    return analyse(model).channels


def analyse(model: ir.Model, sample: Sample = _NO_SAMPLE) -> Analysis:
    """Return all channels of a graph and their positions in each of its values.

    Args:
        model: the graph, sorted topologically; not changed.
        sample: shapes of inputs, by name, that say how often a product is computed; without them,
            an open axis counts as one position, at any resolution.
    """
    flow = _flowed(model)
    families = _settled(flow)
    _keep_last(flow, families)
    roots = flow.unions.roots()
    units = _units(flow, roots)
    axes = {name: _axes_of(value_families, units) for name, value_families in families.items()}
    frozen = _by_channel(flow.frozen, roots, units)
    mixed = _by_channel(flow.mixed, roots, units)
    for node, added in Zeros(flow, axes).sums:
        note = Note(node, node.op_type, "", added)
        for unit in added:
            mixed.setdefault(int(unit), note)
    channels = ChannelMap(
        count=int(units.max(initial=-1)) + 1,
        groups=_groups(flow, axes, units, frozen, mixed),
        parameters={
            name: axes[name]
            for name in model.graph.initializers
            if any(value_families is not None for value_families in axes.get(name, ()))
        },
        products=tuple(_products(flow, axes, _repeats(model, sample))),
        activations=tuple(_activations(flow, axes)),
        frozen=_frozen_operators(flow, roots, units),
    )
    placed = {unit: note.op_type for unit, note in _by_channel(flow.placed, roots, units).items()}
    return Analysis(channels, axes, placed, flow)


def _flowed(model: ir.Model) -> Flow:
    """Apply the rules of all operators, node by node."""
    flow = Flow(model, Lengths(model))
    for node in model.graph:
        flow.enter(node)
        rule = rule_of(node)
        captured = _captured(node)
        if captured or rule is None:
            flow.freeze_values(captured, node, "has a subgraph that reads them")
            flow.freeze_node(node, "is not understood")
        else:
            rule(flow, node)
            flow.freeze_values(settings_of(node), node, "is told by them what to do")
    families = flow.families
    for value in model.graph.outputs:
        flow.freeze(families.get(value.name or "", []), None, f"{value.name!r} is an output")
    for value in model.graph.inputs:  # an initializer whose value may be given anew
        flow.freeze(families.get(value.name or "", []), None, f"{value.name!r} is an input")
    return flow


def _captured(node: ir.Node) -> list[ir.Value]:
    inner = inner_nodes(node)
    graphs = {n.graph for n in inner}
    read = [(value, n.graph) for n in inner for value in n.inputs]
    read += [(value, g) for g in graphs if isinstance(g, ir.Graph) for value in g.outputs]
    return [
        value
        for value, reader_graph in read
        if value is not None and value.graph is not reader_graph
    ]


def _settled(flow: Flow) -> dict[str, list[Family]]:
    """Make each unit of a joint family whole rows along one axis.

    A tensor stays a tensor only if whole rows are removed. Of the axes on which channels differ,
    the first remains; along the others channels are united: a head with all its features.
    """
    makers = {v.name or "": node for node in flow.model.graph for v in node.outputs}
    while True:
        families = {
            name: [compressed(flow.unions.resolved(family)) for family in value_families]
            for name, value_families in flow.families.items()
        }
        if not _settle_some(flow, families, makers):
            return families
        # A row with a position that has no channel has none afterwards.
        flow.families = families


def _settle_some(
    flow: Flow, families: Mapping[str, list[Family]], makers: Mapping[str, ir.Node]
) -> bool:
    """Make joint families whole rows; return whether there were any.

    Each family of a group must see the result for those before it: heads that are transposed stay
    heads. So of families that share channels, only the first is treated.
    """
    touched = np.zeros(flow.unions.count, dtype=bool)
    settled = False
    for name, value_families in families.items():
        flow.enter(makers.get(name))
        for index, family in enumerate(value_families):
            inner = [axis for axis in range(family.ndim) if depends_on(family, axis)][1:]
            channels = family[family >= 0] if inner else family[:0]
            settled = settled or bool(inner)
            if not inner or touched[channels].any():
                continue
            touched[channels] = True
            for axis in inner:
                value_families[index] = flow.couple(value_families[index], axis)
    return settled


def _keep_last(flow: Flow, families: Mapping[str, Sequence[Family]]) -> None:
    """Freeze the only channel of a value."""
    frozen: set[int] = set()
    for name, value_families in families.items():
        for family in value_families:
            if family.size > 1 and family.min() == family.max() >= 0:
                if (channel := int(family.min())) in frozen:
                    continue
                frozen.add(channel)
                flow.freeze([family], None, f"nothing would be left of {name!r}")


def _units(flow: Flow, roots: Units) -> Units:
    """Return the numbers of the channels that layers compute, -1 for all others."""
    numbers = np.full(flow.unions.count, -1, dtype=np.int64)
    computed = [roots[source.channels] for source in flow.sources]
    if not computed:
        return numbers
    line = np.concatenate(computed)
    numbered, first = np.unique(line, return_index=True)
    ordered = numbered[np.argsort(first, kind="stable")]
    numbers[ordered] = np.arange(len(ordered))
    return numbers[roots]


def _axes_of(value_families: Iterable[Family], units: Units) -> tuple[Units | None, ...]:
    lines: list[Units | None] = []
    for family in value_families:
        lines = lines or [None] * family.ndim
        for axis in range(family.ndim):
            if depends_on(family, axis):
                line = along(family, axis)
                numbers = np.where(line < 0, -1, units[line])
                lines[axis] = numbers if bool((numbers >= 0).any()) else None
    return tuple(lines)


def _by_channel(notes: Iterable[Note], roots: Units, units: Units) -> dict[int, Note]:
    first_notes: dict[int, Note] = {}
    for note in notes:
        numbers = np.unique(units[roots[note.channels]])
        for unit in numbers[numbers >= 0]:
            first_notes.setdefault(int(unit), note)
    return first_notes


def _groups(
    flow: Flow,
    axes: Mapping[str, tuple[Units | None, ...]],
    units: Units,
    frozen: Mapping[int, Note],
    mixed: Mapping[int, Note],
) -> tuple[ChannelGroup, ...]:
    """Group units that lie on the same axes of all values and share their notes.

    A value then loses all its channels only if a group does.
    """
    count = int(units.max(initial=-1)) + 1
    marks = _marks(axes, count)
    names: dict[int, str] = {}
    roots = flow.unions.roots()
    for source in reversed(flow.sources):
        names.update(dict.fromkeys(units[roots[source.channels]].tolist(), source.layer))
    by_key: dict[tuple[int, int, int], list[int]] = {}
    for unit in range(count):
        why, what = frozen.get(unit), mixed.get(unit)
        key = (int(marks[unit]), id(why) if why else 0, id(what) if what else 0)
        by_key.setdefault(key, []).append(unit)
    members = _members(flow, axes, [group_units[0] for group_units in by_key.values()], count)
    return tuple(
        ChannelGroup(
            name=names.get(group_units[0], ""),
            units=np.asarray(group_units, dtype=np.int64),
            members=tuple(members[index]),
            frozen=_reason(frozen[group_units[0]]) if group_units[0] in frozen else "",
            mixed=mixed[group_units[0]].op_type if group_units[0] in mixed else "",
        )
        for index, group_units in enumerate(by_key.values())
    )


def _members(
    flow: Flow,
    axes: Mapping[str, tuple[Units | None, ...]],
    firsts: Sequence[int],
    count: int,
) -> list[list[Member]]:
    """Return the axes of parameters on which each group's first unit lies."""
    members: list[list[Member]] = [[] for _ in firsts]
    groups = np.full(count, -1, dtype=np.int64)
    groups[list(firsts)] = np.arange(len(firsts))
    for name in flow.model.graph.initializers:
        for axis, line in enumerate(axes.get(name, ())):
            if line is not None:
                role = flow.roles.get((name, axis), "other")
                group_numbers = groups[line[line >= 0]]
                for group in np.unique(group_numbers[group_numbers >= 0]):
                    members[group].append(Member(name, axis, role))
    return members


def _marks(axes: Mapping[str, tuple[Units | None, ...]], count: int) -> NDArray[np.uint64]:
    """Return a number for each unit that only units on the same axes share.

    It is the sum of a random 64-bit number for each axis, so collisions are improbable.
    """
    rng = np.random.default_rng(0)
    marks = np.zeros(count, dtype=np.uint64)
    for value_axes in axes.values():
        for line in value_axes:
            if line is not None:
                number = rng.integers(0, 2**64, dtype=np.uint64)
                marks[np.unique(line[line >= 0])] += number
    return marks


def _reason(note: Note) -> str:
    if note.node is None:
        return note.reason
    name = named(note.node)
    return f"{note.op_type} {name!r} {note.reason}" if name else f"{note.op_type} {note.reason}"


def _products(
    flow: Flow, axes: Mapping[str, tuple[Units | None, ...]], repeats: Mapping[ir.Node, float]
) -> Iterable[Product]:
    for counted in flow.counted:
        lines = (_units_along(axes, value, axis) for value, axis in counted.axes)
        present = tuple(units for units in lines if units is not None)
        work = counted.work * repeats.get(counted.node, 1.0)
        yield Product(named(counted.node), work, present)
    counted_nodes = {counted.node for counted in flow.counted}
    for node, turns in in_turns(flow.model.graph):
        if node not in counted_nodes and (work := turns * node_macs(node)):
            yield Product(named(node), work * repeats.get(node, 1.0), ())


def _repeats(model: ir.Model, sample: Sample) -> dict[ir.Node, float]:
    """Return how often each product is computed in a sample for once in ``model``."""
    if (sized := at_lengths(model, sample)) is model:
        return {}
    pairs = zip(model.graph, sized.graph, strict=True)
    return {node: node_macs(same) / once for node, same in pairs if (once := node_macs(node))}


def _activations(flow: Flow, axes: Mapping[str, tuple[Units | None, ...]]) -> Iterable[Activation]:
    for value, axis in flow.observed:
        units = _fixed_units(flow, axes, value, axis)
        if units is not None:
            yield Activation(value.name or "", axis, units)


def _units_along(
    axes: Mapping[str, tuple[Units | None, ...]], value: ir.Value, axis: int
) -> Units | None:
    lines = axes.get(value.name or "", ())
    return lines[axis] if 0 <= axis < len(lines) else None


def _fixed_units(
    flow: Flow, axes: Mapping[str, tuple[Units | None, ...]], value: ir.Value, axis: int
) -> Units | None:
    """Return the units along an axis, unless it changes with a dynamic length.

    Such as that of heads merged with the batch.
    """
    units = _units_along(axes, value, axis)
    fixed = (
        value.shape is not None and axis < len(value.shape) and isinstance(value.shape[axis], int)
    )
    if units is None or fixed:
        return units
    moving = flow.lengths.moving(value)
    return None if axis >= len(moving) or moving[axis] else units


def _frozen_operators(flow: Flow, roots: Units, units: Units) -> tuple[FrozenOperator, ...]:
    operators: dict[FrozenOperator, None] = {}
    for note in flow.frozen:
        if bool((units[roots[note.channels]] >= 0).any()):
            name = named(note.node) if note.node is not None else ""
            operators[FrozenOperator(name, note.op_type, note.reason)] = None
    return tuple(operators)
