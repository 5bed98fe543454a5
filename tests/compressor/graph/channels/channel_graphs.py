"""Tiny graphs, and the proof that removing channels from one does what it should."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import helper, numpy_helper

from compressor.graph.channels.analysis import analyse, map_channels
from compressor.graph.channels.slicing import ordering, remove_channels
from compressor.graph.costs import macs
from compressor.graph.inference import infer_shapes
from compressor.models.onnx.ort_runner import graph_runner
from compressor.passes.prune.structured.masking import zeroed, zeroed_axes
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, kept
from compressor.types.tensors import Array, Batch

BATCHES = (2, 5)
Weight = tuple[int, ...] | list[int] | Array
TOLERANCE = 1e-4
"""Relative to the largest output, as the issue asks; sums in another order differ by 1e-6."""


def graph(
    text: str, weights: Mapping[str, Weight], opset: int = 21, *, noted: bool = True
) -> ir.Model:
    """Make a model.

    Args:
        text: its graph in ONNX's syntax, without a name.
        weights: by name: a tuple is the shape of random floats, a list holds integers.
        opset: of ONNX's own domain.
        noted: whether the shapes of all values are noted in it.
    """
    own = onnx.parser.parse_graph(f"g {text}")
    rng = np.random.default_rng(len(text))
    for name, weight in weights.items():
        own.initializer.append(numpy_helper.from_array(_array(weight, rng), name))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    version = 10 if opset < 23 else 11
    proto = helper.make_model(own, opset_imports=opsets, ir_version=version)
    onnx.checker.check_model(proto)
    model = ir.from_proto(proto)
    if noted:
        infer_shapes(model)
    return model


def _array(weight: Weight, rng: np.random.Generator) -> Array:
    if isinstance(weight, tuple):
        return rng.standard_normal(weight).astype(np.float32)
    return np.asarray(weight, dtype=np.int64) if isinstance(weight, list) else weight


def image_net(middle: str, weights: Mapping[str, Weight], read: int = 8) -> ir.Model:
    """Put something between a convolution of 8 channels, ``h``, and a classifier that reads ``z``.

    Args:
        middle: computes ``z`` of ``h`` and of the input ``x``, which has 4 channels.
        weights: those of the middle.
        read: how many channels ``z`` has.
    """
    text = f"""(float[N,4,8,8] x) => (float[N,3] y) {{
        h = Conv<pads=[1,1,1,1]>(x, w, b)
        {middle}
        pooled = GlobalAveragePool(z)
        flat = Flatten(pooled)
        y = Gemm<transB=1>(flat, head, shift)
    }}"""
    own: dict[str, Weight] = {"w": (8, 4, 3, 3), "b": (8,), "head": (3, read), "shift": (3,)}
    return graph(text, {**own, **weights})


def row_net(middle: str, weights: Mapping[str, Weight], read: int = 12) -> ir.Model:
    """Put something between a product of 12 features, ``h``, and one that reads ``z``.

    Args:
        middle: computes ``z`` of ``h``, both ``[N, 5, features]``.
        weights: those of the middle.
        read: how many features ``z`` has.
    """
    text = f"""(float[N,5,4] x) => (float[N,5,3] y) {{
        h = MatMul(x, w)
        {middle}
        y = MatMul(z, head)
    }}"""
    own: dict[str, Weight] = {"w": (4, 12), "head": (read, 3)}
    return graph(text, {**own, **weights})


def checked(
    model: ir.Model, wanted: int, frozen: Iterable[str] = (), mixed: Iterable[str] = ()
) -> ChannelMap:
    """Remove and reorder channels, and compare what may be removed with what should.

    Args:
        model: its output is called ``y``.
        wanted: how many units may go as if their parameters were zero.
        frozen: why others cannot, besides being outputs.
        mixed: the operators that compute with others all at once.
    """
    for seed in range(3):
        channels = proved(model, seed)
        runs(model, seed)
    reordered(model)
    assert reasons(channels) - {"'y' is an output"} == set(frozen)
    assert {g.mixed for g in channels.groups if g.mixed and not g.frozen} == set(mixed)
    assert removable(channels) == wanted
    return channels


def positive(*shape: int) -> Array:
    """Return numbers that may be divided by, or be variances."""
    return np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float32)


def feeds(model: ir.Model, batch: int) -> Batch:
    """Make up inputs; dynamic axes get the length ``batch``."""
    rng = np.random.default_rng(batch)
    found = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        shape = [d if isinstance(d, int) else batch for d in value.shape]
        whole = not value.dtype.is_floating_point()
        made = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
        found[value.name or ""] = made.astype(value.dtype.numpy())
    return found


def outputs(model: ir.Model) -> list[Array]:
    """Run a model on two samples, and on five: more than the analysis takes an open axis for."""
    runner = graph_runner(model, ())
    return [a for batch in BATCHES for a in runner.run(feeds(model, batch)).values()]


def masked(model: ir.Model, channels: ChannelMap, removed: Flags) -> ir.Model:
    """Return a copy whose parameters of removed units are zero, as far as pruning zeroes them."""
    copy = model.clone()
    for name, axes in zeroed_axes(channels).items():
        value = copy.graph.initializers[name]
        assert value.const_value is not None
        array = zeroed(value.const_value.numpy(), axes, removed)
        value.const_value = ir.Tensor(array, dtype=value.const_value.dtype, name=name)
    return copy


def choose(channels: ChannelMap, groups: Iterable[ChannelGroup], seed: int) -> Flags:
    """Remove some units of each group, not all of any."""
    rng = np.random.default_rng(seed)
    removed = np.zeros(channels.count, dtype=bool)
    for group in groups:
        count = int(rng.integers(0, len(group.units))) if seed else len(group.units) // 2
        removed[rng.permutation(group.units)[:count]] = True
    return removed


def open_groups(channels: ChannelMap, *, mixed: bool = False) -> list[ChannelGroup]:
    """Return the groups that may lose units, and lose nothing else by it unless ``mixed``."""
    return [g for g in channels.groups if not g.frozen and (mixed or not g.mixed)]


def close(found: Sequence[Array], wanted: Sequence[Array], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert np.isfinite(other.astype(np.float64)).all()
        most = max(float(np.abs(other).max(initial=0)), 1e-6)
        assert float(np.abs(one - other).max(initial=0)) <= tolerance * most


def proved(model: ir.Model, seed: int = 0, tolerance: float = TOLERANCE) -> ChannelMap:
    """Remove channels, and compare the smaller graph with the one whose channels are zero."""
    before = ir.to_proto(model).SerializeToString()
    channels = map_channels(model)
    removed = choose(channels, open_groups(channels), seed)
    smaller, positions = remove_channels(model, channels, removed)
    assert ir.to_proto(model).SerializeToString() == before
    _valid(model, channels, removed, smaller)
    for name, axes in channels.parameters.items():
        value, short = (m.graph.initializers[name].const_value for m in (model, smaller))
        assert value is not None
        assert short is not None
        wanted = value.numpy()
        for axis, units in enumerate(axes):
            own = positions.get(name, {}).get(axis)
            stays = (
                np.ones(wanted.shape[axis], dtype=bool) if units is None else kept(units, removed)
            )
            assert (own is None) == bool(stays.all())
            if own is not None:
                assert own.tolist() == np.flatnonzero(stays).tolist()
                wanted = np.take(wanted, own, axis)
        assert np.array_equal(short.numpy(), wanted)
    close(outputs(smaller), outputs(masked(model, channels, removed)), tolerance)
    return channels


def runs(model: ir.Model, seed: int = 0) -> ChannelMap:
    """Remove channels, of mixed groups too; the smaller graph has outputs of the same shapes."""
    channels = map_channels(model)
    removed = choose(channels, open_groups(channels, mixed=True), seed)
    smaller, _ = remove_channels(model, channels, removed)
    _valid(model, channels, removed, smaller)
    shapes = [[a.shape for a in outputs(m)] for m in (smaller, model)]
    assert shapes[0] == shapes[1]
    return channels


def reordered(model: ir.Model, seed: int = 0, tolerance: float = TOLERANCE) -> set[str]:
    """Let all channels change places that may; return the groups' first layers.

    The outputs must stay as they are, whatever the new order.
    """
    found = analyse(model)
    order = ordering(found)
    groups = [g for g in found.channels.groups if not order.obstacle(g)]
    rng = np.random.default_rng(seed)
    copy = model.clone()
    for group in groups:
        places = rng.permutation(len(group.units))
        for member in group.members:
            value = copy.graph.initializers[member.parameter]
            assert value.const_value is not None
            array = np.take(value.const_value.numpy(), places, member.axis)
            value.const_value = ir.Tensor(array, name=member.parameter)
    close(outputs(copy), outputs(model), tolerance)
    return {g.name for g in groups}


def _valid(model: ir.Model, channels: ChannelMap, removed: Flags, smaller: ir.Model) -> None:
    proto = ir.to_proto(smaller)
    if not any(node.domain for node in smaller.graph):
        onnx.checker.check_model(proto, full_check=True)
    assert channels.macs(np.zeros(channels.count, dtype=bool)) == macs(model)
    assert round(channels.macs(removed)) == macs(smaller)


def removable(channels: ChannelMap) -> int:
    """Return how many units may go without further ado."""
    return sum(len(g.units) for g in open_groups(channels))


def reasons(channels: ChannelMap) -> set[str]:
    return {g.frozen for g in channels.groups if g.frozen}
