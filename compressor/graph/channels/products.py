"""Channels through convolutions, matrix products and ``Einsum``, where they begin and end."""

from __future__ import annotations

import string
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import UNKNOWN, Flow, Meeting
from compressor.graph.channels.labels import Family, along, depends_on, placed, spread
from compressor.graph.lengths import Shape
from compressor.graph.stored_weights import weight_source
from compressor.graph.values import input_of
from compressor.types.channels import Role, Units


def convolution(flow: Flow, node: ir.Node) -> None:
    """``Conv`` of weights ``[O, I / groups, ...]``."""
    groups, weight, shape = _kernel(flow, node)
    if not shape:
        return
    read, written = _read(flow, node), axis_units(flow, weight, 0, shape[0])
    if groups == 1:
        unite_read(flow, node, read, axis_units(flow, weight, 1, shape[1]))
        _role(flow, weight, 1, "input")
    else:
        _group_wise(flow, node, read, written.reshape(groups, -1))
    _keep_kernel(flow, node, weight, 2 if groups == 1 else 1)
    _role(flow, weight, 0, "output")
    _write(flow, node, weight, written, sourced=groups == 1 or groups < shape[0])
    # A product of the weight's axes is proportional to the work, whatever the groups.
    flow.count(node, (weight, 0), (weight, 1))


def transposed_convolution(flow: Flow, node: ir.Node) -> None:
    """``ConvTranspose`` of weights ``[I, O / groups, ...]``."""
    groups, weight, shape = _kernel(flow, node)
    if not shape:
        return
    read, inputs = _read(flow, node), axis_units(flow, weight, 0, shape[0])
    if groups == 1:
        unite_read(flow, node, read, inputs)
        written = axis_units(flow, weight, 1, shape[1])
        _role(flow, weight, 0, "input")
        _role(flow, weight, 1, "output")
    else:
        _group_wise(flow, node, read, inputs.reshape(groups, -1))
        written = inputs.reshape(groups, -1)[:, :1].repeat(shape[1], 1).reshape(-1)
        _role(flow, weight, 0, "output")
    _keep_kernel(flow, node, weight, 2 if groups == 1 else 1)
    _write(flow, node, weight, written, sourced=groups < shape[0] or groups == 1)
    flow.count(node, (weight, 0), (weight, 1))


def _kernel(flow: Flow, node: ir.Node) -> tuple[int, ir.Value | None, Shape]:
    """Return a convolution's groups, its weight and the weight's shape.

    The shape is empty where the weight is computed; the node is frozen then.
    """
    weight = node.inputs[1]
    shape = flow.shape(weight)
    if shape is None or not flow.is_constant(weight):
        flow.freeze_node(node, "has a weight that is computed")
        shape = ()
    return node.attributes.get_int("group", 1), weight, shape


def _read(flow: Flow, node: ir.Node) -> Units | None:
    """Return the channels that a convolution reads; those on its other axes are frozen."""
    channels = None
    for family in flow.labels(node.inputs[0]):
        if depends_on(family, 1) and family.size == family.shape[1]:
            channels = along(family, 1)
        elif any(depends_on(family, axis) for axis in range(1, family.ndim)):
            flow.freeze([family], node, "slides over them")
    return channels


def _keep_kernel(flow: Flow, node: ir.Node, weight: ir.Value | None, first: int) -> None:
    """Freeze the other axes of a weight, which a second reader might cut."""
    for family in flow.labels(weight):
        if any(depends_on(family, axis) for axis in range(first, family.ndim)):
            flow.freeze([family], node, "slides over them")


def unite_read(flow: Flow, node: ir.Node, read: Units | None, weight_channels: Units) -> None:
    """Unite the channels that are read with the weight's input axis."""
    if read is not None:
        flow.unify(read, weight_channels, node)
    else:
        flow.freeze([weight_channels], node, "reads channels that nothing computes")


def _group_wise(flow: Flow, node: ir.Node, read: Units | None, written: Units) -> None:
    flow.couple(written, 1)
    if read is not None and len(read) % len(written):
        flow.freeze([read], node, UNKNOWN)  # it fits one length of an open axis
        read = None
    if read is None:
        flow.freeze([written], node, "reads channels that nothing computes")
        return
    grouped = read.reshape(len(written), -1)
    flow.couple(grouped, 1)
    flow.unify(grouped[:, :1], written[:, :1], node)


def _write(
    flow: Flow, node: ir.Node, weight: ir.Value | None, written: Units, *, sourced: bool
) -> None:
    output = node.outputs[0]
    rank = len(flow.shape(output) or flow.shape(node.inputs[0]) or ())
    bias = input_of(node, 2)
    if bias is not None:
        flow.unify(written, axis_units(flow, bias, 0, len(written)), node)
        _role(flow, bias, 0, "bias")
    if rank < 2:
        flow.freeze([written], node, "the shape of its output is not known")
        return
    if sourced:
        origin, _ = weight_source(weight)
        flow.source(node, origin, written)
    # Channels of several initializer axes are of their own; a single one has none to remove.
    families = [placed(written, 1, rank)] if len(written) > 1 else []
    batches = [
        f for f in flow.labels(node.inputs[0]) if f.ndim == rank and f.size == f.shape[0] > 1
    ]
    flow.put(output, [*families, *batches])
    flow.observe(output, 1)


def axis_units(flow: Flow, value: ir.Value | None, axis: int, length: int) -> Units:
    """Return the channels along an axis of a weight, however the weight is stored."""
    family = flow.on_axis(value, axis)
    if family is not None and next(i for i, n in enumerate(family.shape) if n > 1) == axis:
        family = flow.couple_others(family, axis)  # a weight that is stored as one long line
    if family is None or family.size != length:
        return np.full(length, -1, dtype=np.int64)
    return along(family, axis)


def _role(flow: Flow, value: ir.Value | None, axis: int, role: Role) -> None:
    """Note the role of a weight's axis, also where the weight is stored in another form."""
    origin, swapped = weight_source(value)
    if value is None:
        return
    if origin is None:
        note_moved(flow, value, axis, role)
        return
    rank = len(flow.shape(value) or ())
    flow.role(origin, {rank - 1: rank - 2, rank - 2: rank - 1}[axis] if swapped else axis, role)


def note_moved(flow: Flow, value: ir.Value, axis: int, role: Role) -> None:
    """Note a role for the axes of parameters that an axis of a constant is put together from."""
    maker = value.producer()
    if maker is not None and maker.op_type == "Concat" and not maker.attributes.get_int("axis", 0):
        for part in filter(None, maker.inputs):  # directions have channels of their own
            note_moved(flow, part, axis, role)
        return
    line = flow.on_axis(value, axis)
    if line is None or not flow.is_constant(value):
        return
    for source in stored_parts(value):
        for family in flow.labels(source):
            if np.isin(family, line[line >= 0]).any():
                flow.role(source, int(np.argmax(family.shape)), role)


def stored_parts(value: ir.Value | None) -> Iterator[ir.Value]:
    """Yield the floats that a constant is made of, as PyTorch's exporter sorts gates."""
    if value is None or value.is_initializer():
        if value is not None and value.dtype is not None and value.dtype.is_floating_point():
            yield value
        return
    maker = value.producer()
    for source in () if maker is None else maker.inputs:
        yield from stored_parts(source)


def gemm(flow: Flow, node: ir.Node) -> None:
    """``Gemm``: a matrix product of two axes each, and what is added to it."""
    first, second = node.inputs[0], node.inputs[1]
    left = [_turned(f, node, "transA") for f in flow.labels(first)]
    right = [_turned(f, node, "transB") for f in flow.labels(second)]
    _product(flow, node, left, right)
    bias = input_of(node, 2)
    output, shape = node.outputs[0], flow.shape(node.outputs[0])
    if bias is not None and shape is not None:
        flow.put(output, flow.broadcast(node, [output, bias], shape))
        _role(flow, bias, max(len(flow.shape(bias) or ()) - 1, 0), "bias")


def _turned(family: Family, node: ir.Node, attribute: str) -> Family:
    return family.T if node.attributes.get_int(attribute, 0) else family


def matmul(flow: Flow, node: ir.Node) -> None:
    """``MatMul``: of vectors' batches and a weight, or of two computed values."""
    shapes = [flow.shape(v) for v in node.inputs]
    if any(shape is None or len(shape) < 2 for shape in shapes):
        flow.freeze_node(node, "multiplies a vector, or a value of unknown shape")
        return
    rank = max(len(shape or ()) for shape in shapes)
    left, right = ([spread(f, rank) for f in flow.labels(v)] for v in node.inputs)
    _product(flow, node, left, right)


def _product(flow: Flow, node: ir.Node, left: list[Family], right: list[Family]) -> None:
    """Multiply ``[..., M, K]`` and ``[..., K, N]``."""
    first, second = node.inputs[0], node.inputs[1]
    output = node.outputs[0]
    summed = _summed(flow, node, left, [np.swapaxes(f, -1, -2) for f in right])
    # What is left of [..., M, K] is [..., M, 1]; a head that is summed over leaves its batch axis.
    rows = [f[..., :1] for f in left]
    columns = [f[..., :1, :] for f in right]
    merged: list[Family] = [f for f in rows if f.size > 1]
    for family in (f for f in columns if f.size > 1):
        merged = flow.united(family, merged, node)
    _check_batches(flow, node, merged)
    flow.put(output, merged)
    rank = len(flow.shape(output) or ())
    # An outer product, such as that of positions and frequencies, is no layer.
    layer = (flow.shape(first) or (0,))[_summed_axis(flow, node)] > 1
    for value, axis, family_axis in ((second, rank - 1, -1), (first, rank - 2, -2)):
        if layer and flow.is_constant(value) and not flow.is_constant(output):
            written = [f for f in merged if depends_on(f, axis)]
            origin, _ = weight_source(value)
            for family in written:
                flow.source(node, origin, family)
                flow.observe(output, axis)
            _product_roles(flow, node, value, family_axis)
    axes = [(output, axis) for axis in range(rank)]
    flow.count(node, *axes, *([(first, _summed_axis(flow, node))] if summed else []))


def _summed_axis(flow: Flow, node: ir.Node) -> int:
    rank = len(flow.shape(node.inputs[0]) or ())
    return rank - 2 if node.attributes.get_int("transA", 0) else rank - 1


def _product_roles(flow: Flow, node: ir.Node, value: ir.Value | None, written: int) -> None:
    rank = len(flow.shape(value) or ())
    turned = node.attributes.get_int("transB" if written == -1 else "transA", 0)
    axis = rank - 1 if (written == -1) != bool(turned) else rank - 2
    _role(flow, value, axis, "output")
    _role(flow, value, 2 * rank - 3 - axis, "input")


def _summed(flow: Flow, node: ir.Node, left: list[Family], right: list[Family]) -> bool:
    """Unite the channels that are summed over, the last axis of both; return whether there are any.

    Where they also depend on the batch, as in heads, a whole batch element stays or goes.
    """
    read = [_alone(flow, f, node) for f in left if depends_on(f, -1)]
    held = [_alone(flow, f, node) for f in right if depends_on(f, -1)]
    for family in (*read, *held):
        if family.size > family.shape[-1]:
            flow.couple(family, family.ndim - 1)
    if read and held:
        for mine in read:
            for theirs in held:
                _sum(flow, node, mine, theirs)
    else:
        flow.freeze([*read, *held], node, "sums over channels that only one factor has")
    return bool(read or held)


def _sum(flow: Flow, node: ir.Node, mine: Family, theirs: Family) -> None:
    """Unite what two factors sum over; values shared by all heads stay whole."""
    heads = [family.size > family.shape[-1] for family in (mine, theirs)]
    if heads[0] == heads[1]:
        flow.unify(mine, theirs, node)
    else:
        flow.freeze([theirs if heads[0] else mine], node, "holds the same for every head or group")


def _alone(flow: Flow, family: Family, node: ir.Node) -> Family:
    """Return summed channels without the axis with which they form a matrix."""
    if depends_on(family, -2):
        flow.freeze([family], node, "sums over channels that lie on both axes of a matrix")
        return family[..., :1, :]
    return family


def _check_batches(flow: Flow, node: ir.Node, merged: list[Family]) -> None:
    """Freeze channels on batch axes that only one factor has."""
    rank = len(flow.shape(node.outputs[0]) or ())
    for value in node.inputs[:2]:
        shape = flow.shape(value) or ()
        lengths = (1,) * (rank - len(shape)) + shape
        for family in merged:
            families = [spread(f, rank) for f in flow.labels(value)]
            fixed = [
                i
                for i in range(rank - 2)
                if depends_on(family, i)
                and lengths[i] > 1
                and not any(depends_on(f, i) for f in families)
            ]
            if fixed:
                name = "" if value is None else value.name
                flow.fix(family, fixed, node, f"meets {name!r}, which has no channels")


def einsum(flow: Flow, node: ir.Node) -> None:
    """``Einsum``, each letter once in a term."""
    inputs = [v for v in node.inputs if v is not None]
    shapes = [flow.shape(v) or () for v in inputs]
    parsed = terms(node.attributes.get_string("equation", ""), [len(s) for s in shapes])
    if any(flow.shape(v) is None for v in inputs):
        flow.freeze_node(node, UNKNOWN)
        return
    if parsed is None:
        flow.freeze_node(node, "has an equation that is not understood")
        return
    input_terms, result = parsed
    letters = [*result, *sorted(set("".join(input_terms)) - set(result))]
    meetings = [
        Meeting(
            value.name or "",
            tuple(_length(shape, term, letter) for letter in letters),
            [_spread(family, term, letters) for family in flow.labels(value)],
        )
        for value, shape, term in zip(inputs, shapes, input_terms, strict=True)
    ]
    families = flow.meet(node, meetings)
    summed = list(range(len(result), len(letters)))
    flow.sum_over(families, summed)
    left = []
    for family in families:
        rest = family
        for axis in summed:
            rest = rest.take([0], axis)
        if rest.size > 1:
            left.append(rest.reshape(rest.shape[: len(result)]))
    flow.put(node.outputs[0], left)
    _note_layers(flow, node, input_terms, result)


def terms(equation: str, ranks: list[int]) -> tuple[list[str], str] | None:
    """Return the letters of each input and of the output, ellipses written out."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    named = inputs.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    lengths = [
        rank - len(t.replace("...", ""))
        for t, rank in zip(named, ranks, strict=False)
        if "..." in t
    ]
    most = max(lengths, default=0)
    if len(named) != len(ranks) or most > len(free) or min(lengths, default=0) < 0:
        return None
    if not arrow:
        line = "".join(named).replace(".", "")
        once = "".join(sorted(c for c in set(line) if line.count(c) == 1))
        result = ("..." if lengths else "") + once
    whole = []
    for term, rank in zip(named, ranks, strict=True):
        count = rank - len(term.replace("...", ""))
        whole.append(term.replace("...", "".join(free[most - count : most])))
    result = result.replace("...", "".join(free[:most]))
    fits = all(len(t) == len(set(t)) == r for t, r in zip(whole, ranks, strict=True))
    return (whole, result) if fits and len(set(result)) == len(result) else None


def _length(shape: tuple[int, ...], term: str, letter: str) -> int:
    return shape[term.index(letter)] if letter in term else 1


def _spread(family: Family, term: str, letters: list[str]) -> Family:
    order = [term.index(letter) for letter in letters if letter in term]
    ordered = np.transpose(family, order)
    return ordered.reshape([_length(family.shape, term, letter) for letter in letters])


def _note_layers(flow: Flow, node: ir.Node, input_terms: list[str], result: str) -> None:
    """Record the letters that only a weight has: they are channels that a layer computes."""
    output = node.outputs[0]
    if flow.is_constant(output):
        return
    for index, (value, term) in enumerate(zip(node.inputs, input_terms, strict=True)):
        others = "".join(t for i, t in enumerate(input_terms) if i != index)
        if value is None or not flow.is_constant(value) or all(c in result for c in term):
            continue
        origin, _ = weight_source(value)
        for axis, letter in enumerate(term):
            written = letter in result and letter not in others
            flow.role(value, axis, "output" if written else "input")
            family = flow.on_axis(output, result.index(letter)) if written else None
            if family is not None and depends_on(family, result.index(letter)):
                flow.source(node, origin, family)
                flow.observe(output, result.index(letter))
