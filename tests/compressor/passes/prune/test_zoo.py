"""Half of the channels of every architecture in the zoo removed: what remains is the same network.

The network with these channels' parameters set to zero is the reference. It needs no model of what
any operator does, so that it judges the rules of the analysis one and all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.graph.channels.analysis import map_channels
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import macs
from compressor.graph.values import constant_array, static_shape
from compressor.models.onnx.carrier import open_onnx
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.channels import ChannelMap, Flags, Units, kept
from compressor.types.tensors import Array
from tests import small_zoo as zoo
from tests.zoo_pruning import WANTED, chain, half, run, worst

# Those that lower fast; the others, most transformers among them, are marked slow.
QUICK = (
    "super-resolution",
    "shufflenet",
    "resnext",
    "cross-attention",
    "volumes",
)
# The multiply-accumulates that remain when half of every group goes, as a share. A quarter would,
# if nothing were frozen and every layer lost half of what it reads and writes. More remain where
# the model returns its features, where half of the channels pass a layer by, or where whole groups
# of a grouped convolution go, each of which is a product of its own.
MOST = 0.52
MOST_OF = {"clip-vision": 0.65, "shufflenet": 0.75}
CHAINED = "shufflenet"  # goes through the whole chain by default
REACHED = {"shufflenet": 0.54}  # where half is out of reach: what the pass says can be had
STEP = 0.05  # the largest share that a single unit takes: a whole group of a grouped convolution
CLOSE = 1e-4  # relative to the largest output; float32 sums in another order differ by 1e-6

every = pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in zoo.NAMES],
)


@cache
def mapped(name: str) -> tuple[ir.Model, ChannelMap]:
    """Return an architecture's graph and its channels."""
    model = zoo.carrier(name).graph()
    return model, map_channels(model)


def axes(channels: ChannelMap, removed: Flags) -> Iterator[tuple[str, int, Flags]]:
    """Yield what remains of each axis of a parameter on which units lie."""
    for name, units in channels.parameters.items():
        for axis, one in enumerate(units):
            if one is not None:
                yield name, axis, kept(one, removed)


def zeroed(model: ir.Model, channels: ChannelMap, removed: Flags) -> ir.Model:
    """Return the model with every parameter of the removed units set to zero."""
    changed = model.clone()
    values: dict[str, Array] = {}
    for name, axis, remains in axes(channels, removed):
        if name not in values:
            found = constant_array(changed.graph.initializers[name])
            assert found is not None, name
            values[name] = found.copy()
        values[name][(slice(None),) * axis + (~remains,)] = 0
    for name, value in values.items():
        changed.graph.initializers[name].const_value = ir.tensor(value, name=name)
    return changed


@every
def test_half_of_the_channels_can_go(name: str) -> None:
    model, channels = mapped(name)
    removed = half(channels)
    share = channels.macs(removed) / channels.macs(np.zeros_like(removed))
    assert share <= MOST_OF.get(name, MOST)
    smaller, positions = remove_channels(model, channels, removed)
    batch = zoo.batch(zoo.architecture(name).inputs)
    found, wanted = run(smaller, batch), run(model, batch)
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in wanted.items()}
    assert all(np.isfinite(v).all() for v in found.values())
    assert macs(smaller) == pytest.approx(channels.macs(removed), rel=1e-6)
    assert sum(product.macs for product in channels.products) == macs(model)
    check_positions(model, smaller, channels, removed, positions)


def check_positions(
    model: ir.Model,
    smaller: ir.Model,
    channels: ChannelMap,
    removed: Flags,
    positions: Mapping[str, Mapping[int, Units]],
) -> None:
    """Check that each parameter holds what it held, at the positions that are said to remain."""
    expected: dict[str, dict[int, list[int]]] = {}
    for name, axis, remains in axes(channels, removed):
        if not remains.all():
            expected.setdefault(name, {})[axis] = np.flatnonzero(remains).tolist()
    found = {n: {a: p.tolist() for a, p in by.items()} for n, by in positions.items()}
    for name, by_axis in expected.items():
        before = constant_array(model.graph.initializers[name])
        after = constant_array(smaller.graph.initializers[name])
        assert before is not None
        assert after is not None
        for axis, places in by_axis.items():
            assert found[name][axis] == places, (name, axis)
            before = before.take(places, axis)
        np.testing.assert_array_equal(after, before, err_msg=name)
    for name, value in smaller.graph.initializers.items():
        old = model.graph.initializers.get(name)
        if old is not None and name not in expected and name in channels.parameters:
            assert static_shape(value) == static_shape(old), name


@pytest.mark.slow
def test_both_directions_of_a_recurrence_are_zeroed_for_the_proof() -> None:
    _, channels = mapped("recurrent")
    roles = {m.parameter: m.role for g in channels.groups for m in g.members}
    assert "gru.weight_hh_l0_reverse" in roles
    assert "other" not in roles.values()


@every
def test_what_remains_computes_what_it_did(name: str) -> None:
    model, channels = mapped(name)
    removed = half(channels, mixed=False)
    smaller, _ = remove_channels(model, channels, removed)
    reference = zeroed(model, channels, removed)
    batch = zoo.batch(zoo.architecture(name).inputs)
    wanted = run(reference, batch)
    assert worst(run(smaller, batch), wanted) < CLOSE
    if removed.any():
        # Else the comparison above would say nothing.
        assert worst(wanted, run(model, batch)) > CLOSE


@every
def test_groups_can_lose_channels_alone(name: str) -> None:
    """Each group by itself, so that no group's mistake hides behind another's."""
    model, channels = mapped(name)
    batch = zoo.batch(zoo.architecture(name).inputs)
    plain = [g for g in channels.groups if not g.frozen and not g.mixed and len(g.units) > 1]
    rng = np.random.default_rng(1)
    some = rng.permutation(len(plain))[:3]
    for group in (plain[i] for i in some):
        removed = np.zeros(channels.count, dtype=bool)
        removed[rng.permutation(group.units)[: len(group.units) - 1]] = True
        smaller, _ = remove_channels(model, channels, removed)
        wanted = run(zeroed(model, channels, removed), batch)
        assert worst(run(smaller, batch), wanted) < CLOSE, group.name


@every
def test_groups_say_what_they_are(name: str) -> None:
    model, channels = mapped(name)
    members = np.concatenate([g.units for g in channels.groups])
    np.testing.assert_array_equal(np.sort(members), np.arange(channels.count))
    nodes = {node.name for node in ir.traversal.RecursiveGraphIterator(model.graph)}
    for frozen in channels.frozen:  # the outputs of the model are kept by no node
        assert frozen.reason
        assert frozen.node in nodes if frozen.op_type else frozen.node == ""
    for group in channels.groups:
        for member in group.members:
            units = channels.parameters[member.parameter][member.axis]
            assert units is not None
            assert np.isin(group.units, units).all(), (group.name, member)
    for parameter, own in channels.parameters.items():
        shape = static_shape(model.graph.initializers[parameter])
        assert shape is not None
        lengths = [n if u is None else len(u) for n, u in zip(shape, own, strict=True)]
        assert lengths == list(shape)


@every
def test_the_exported_file_loses_the_same(name: str, tmp_path: Path) -> None:
    model, channels = mapped(name)
    removed = half(channels)
    smaller, positions = remove_channels(model, channels, removed)
    ir.save(model, tmp_path / "model.onnx")
    opened = open_onnx(tmp_path / "model.onnx", 21).graph()
    again = map_channels(opened)
    smaller_again, positions_again = remove_channels(
        opened, again, translated(channels, removed, again)
    )
    batch = zoo.batch(zoo.architecture(name).inputs)
    assert worst(run(smaller_again, batch), run(smaller, batch)) < 1e-6
    assert _lists(positions_again) == _lists(positions)


def _lists(positions: Mapping[str, Mapping[int, Units]]) -> dict[str, dict[int, list[int]]]:
    return {n: {a: p.tolist() for a, p in by.items()} for n, by in positions.items()}


def translated(channels: ChannelMap, removed: Flags, other: ChannelMap) -> Flags:
    """Return the units of another map that lie where the removed ones do."""
    found = np.zeros(other.count, dtype=bool)
    for name, axis, remains in axes(channels, removed):
        units = other.parameters[name][axis]
        assert units is not None, (name, axis)
        gone = units[~remains]
        assert (gone >= 0).all(), (name, axis)
        found[gone] = True
    return found


@pytest.mark.parametrize(
    "name",
    [n if n == CHAINED else pytest.param(n, marks=pytest.mark.slow) for n in zoo.NAMES],
)
def test_half_of_the_work_goes_by_the_pass_and_the_rest_reloads(name: str, tmp_path: Path) -> None:
    """The pass itself, with its proof; both formats; and the same pass on the whole ONNX file."""
    found = chain(name, tmp_path)
    assert found.module.target <= REACHED.get(name, WANTED)
    assert found.module.target - STEP <= found.module.share <= found.module.target
    assert found.effect > CLOSE  # else the comparisons say nothing
    assert isinstance(found.module.carrier, TorchCarrier)  # which can be trained
    for pruned in (found.module, found.file):
        assert pruned.proof is not None
        assert pruned.proof < CLOSE
    assert set(found.reloads) == {"safetensors", "onnx", "load", "module"}
    assert max(found.reloads.values()) < CLOSE, found.reloads
    assert (found.file.target, found.file.share) == (found.module.target, found.module.share)
    assert found.moved == ()
    assert found.difference < CLOSE
