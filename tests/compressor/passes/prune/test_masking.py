"""Zeroed units, and the proof that they are as good as removed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import ModelError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.prune.structured.masking import MaskedModel, prove, worst_difference, zeroed
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Member
from compressor.types.tensors import Array, Batch
from tests.compressor.passes.prune.channel_maps import chain


def products(weights: dict[str, Array]) -> OnnxCarrier:
    """Matrices ``[columns, rows]`` one behind the other."""
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b", 3]))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": 21}, name="chain")
    for name, array in weights.items():
        weight = ir.Value(name=name, const_value=ir.tensor(array))
        weight.shape, weight.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.FLOAT)
        graph.register_initializer(weight)
        out = ir.Value(name=f"y_{name}", type=ir.TensorType(ir.DataType.FLOAT))
        out.shape = ir.Shape(["b", array.shape[1]])
        graph.append(ir.node("MatMul", [value, weight], outputs=[out], name=f"n_{name}"))
        value = out
    graph.outputs.append(value)
    return OnnxCarrier(ir.Model(graph, ir_version=10))


def swapped(channels: ChannelMap) -> ChannelMap:
    """Return the map for matrices that are stored with their columns first."""
    groups = tuple(
        ChannelGroup(
            g.name,
            g.units,
            tuple(Member(m.parameter, 1 - m.axis, m.role) for m in g.members),
            g.frozen,
        )
        for g in channels.groups
    )
    parameters = {name: axes[::-1] for name, axes in channels.parameters.items()}
    return ChannelMap(channels.count, groups, parameters, channels.products, (), ())


def flags(count: int, *gone: int) -> Flags:
    found = np.zeros(count, dtype=bool)
    found[list(gone)] = True
    return found


def test_parameters_are_zeroed_where_removed_units_lie():
    weight = np.arange(1.0, 13).reshape(3, 4)
    axes = {0: np.array([0, 1, -1]), 1: np.array([2, 2, 3, -1])}
    found = zeroed(weight, axes, flags(4, 1, 2))
    assert found.tolist() == [[0, 0, 3, 4], [0, 0, 0, 0], [0, 0, 11, 12]]
    assert weight[1, 0] == 5, "the original is as it was"
    assert zeroed(weight, axes, flags(4)) is weight


def test_a_masked_model_is_the_model_with_zeros():
    random = np.random.default_rng(0)
    first, second = random.standard_normal((3, 5)), random.standard_normal((5, 2))
    model = products({"w0": first.astype(np.float32), "w1": second.astype(np.float32)})
    channels = swapped(chain([5, 2], frozen=frozenset({1})))
    x = random.standard_normal((4, 3)).astype(np.float32)
    masked = MaskedModel(model, channels)
    stay = [0, 2, 4]
    wanted = {(): x @ first @ second, (1, 3): x @ first[:, stay] @ second[stay]}
    for gone, result in wanted.items():
        found = masked.run({"x": x}, flags(7, *gone))["y_w1"]
        assert found == pytest.approx(result, rel=1e-5, abs=1e-5)


def test_statistics_and_other_constants_stay():
    group = ChannelGroup(
        "n", np.array([0, 1]), (Member("v", 0, "norm-variance"), Member("c", 0, "other"))
    )
    axes = {"v": (group.units,), "c": (group.units,)}
    masked = MaskedModel(
        products({"w0": np.ones((3, 2), np.float32)}), ChannelMap(2, (group,), axes, (), (), ())
    )
    x = np.ones((1, 3), np.float32)
    assert masked.run({"x": x}, flags(2, 0, 1))["y_w0"].tolist() == [[3, 3]]


GROUPS = ("a", "b", "c", "d")


def four(mixed: str = "") -> ChannelMap:
    """Four groups of two units each."""
    groups = tuple(
        ChannelGroup(
            name, np.array([2 * i, 2 * i + 1]), (), mixed="LayerNormalization" * (name == mixed)
        )
        for i, name in enumerate(GROUPS)
    )
    return ChannelMap(8, groups, {}, (), (), ())


def outputs(removed: Flags, extra: float = 0.0) -> Batch:
    return {"y": np.array([[8.0 - removed.sum() + extra, 1.0]])}


def test_equal_outputs_prove_all_units():
    channels = four()
    proof = prove(outputs, outputs, channels, flags(8, 0, 2, 3))
    assert (proof.proved, proof.mixed, proof.difference) == (3, {}, 0)
    assert "3 removed units were proved on calibration data" in proof.note(made_up=False)
    assert "random inputs" in proof.note(made_up=True)


@pytest.mark.parametrize("wrong", GROUPS)
def test_a_wrong_removal_is_an_error_that_names_the_group(wrong):
    channels = four()
    bad = channels.groups[GROUPS.index(wrong)].units

    def sliced(removed: Flags) -> Batch:
        return outputs(removed, 0.01 * bool(removed[bad].any()))

    with pytest.raises(ModelError, match=f"the channels of '{wrong}': cannot be removed") as raised:
        prove(outputs, sliced, channels, flags(8, 0, 1, 2, 4, 7))
    assert f"match: {wrong}, skip: true" in raised.value.remedy


def test_the_limit_is_relative_to_the_largest_output():
    channels = four()

    def off(by: float):
        return lambda removed: outputs(removed, by * 7)  # the largest output is 7

    assert prove(outputs, off(0.9e-4), channels, flags(8, 0)).difference < 1e-4
    with pytest.raises(ModelError, match="the limit is 1e-04"):
        prove(outputs, off(1.1e-4), channels, flags(8, 0))


def test_mixed_groups_are_left_out_and_named():
    channels = four(mixed="b")
    seen = []

    def sliced(removed: Flags) -> Batch:
        seen.append(np.flatnonzero(removed).tolist())
        return outputs(removed)

    proof = prove(outputs, sliced, channels, flags(8, 0, 2, 3))
    assert seen == [[0]]
    assert proof.mixed == {"b": "LayerNormalization"}
    assert "the units of 1 groups that LayerNormalization mixes were not compared" in proof.note(
        False
    )
    only = prove(outputs, sliced, channels, flags(8, 2))
    assert only.proved == 0
    assert len(seen) == 1, "nothing to compare"
    assert only.note(False).startswith("no removal could be proved")


def test_differences_of_outputs():
    x = {"y": np.array([1.0, -4.0], np.float32), "n": np.array([3])}
    assert worst_difference(x, x)[0] == 0
    other = {"z": np.array([1.5, -4.0], np.float32), "n": np.array([4])}
    assert worst_difference(x, other)[0] == pytest.approx(0.125)
    missing = {"y": np.array([np.nan, -4.0], np.float32), "n": np.array([3])}
    assert worst_difference(x, missing)[0] == np.inf
    assert worst_difference(missing, x)[0] == np.inf
    assert worst_difference(missing, missing)[0] == 0
    shorter = {"y": np.array([1.0], np.float32), "n": np.array([3])}
    assert worst_difference(x, shorter)[0] == np.inf
    half = {"y": np.array([1.0, 100.0], np.float16)}
    assert worst_difference(half, half)[1] == 2e-2
