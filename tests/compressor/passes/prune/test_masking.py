"""Zeroed units, and the proof that they are as good as removed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from compressor.errors import ModelError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.prune.structured.masking import (
    Compared,
    MaskedModel,
    in_doubles,
    prove,
    zeroed,
)
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


def both(
    sliced: Callable[[Flags], Batch], exact: Callable[[Flags], Batch] | None = None
) -> tuple[Compared, Compared]:
    """Return the comparisons with a model without units; in doubles it may be another."""
    wide = exact or sliced
    return (lambda gone: (outputs(gone), sliced(gone))), (lambda gone: (outputs(gone), wide(gone)))


def test_equal_outputs_prove_all_units():
    channels = four()
    proof = prove(*both(outputs), channels, flags(8, 0, 2, 3))
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
        prove(*both(sliced), channels, flags(8, 0, 1, 2, 4, 7))
    assert f"match: {wrong}, skip: true" in raised.value.remedy


def test_the_limit_is_relative_to_the_largest_output():
    channels = four()

    def off(by: float):
        return lambda removed: outputs(removed, by * 7)  # the largest output is 7

    assert prove(*both(off(0.9e-4)), channels, flags(8, 0)).difference < 1e-4
    with pytest.raises(ModelError, match="the limit is 1e-04"):
        prove(*both(off(1.1e-4)), channels, flags(8, 0))


def test_doubles_decide_where_rounding_is_magnified():
    def rounded(removed: Flags) -> Batch:
        return outputs(removed, 0.02 * bool(removed.any()))

    proof = prove(*both(rounded, exact=outputs), four(), flags(8, 0, 2))
    assert (proof.proved, proof.difference) == (2, 0)
    assert proof.rounding == pytest.approx(0.02 / 6)
    assert "in double precision the smaller model differs by at most 0.0e+00" in proof.note(False)
    assert "rounding in the model's own makes that 3.3e-03" in proof.note(False)


def test_the_wrong_group_is_named_by_what_doubles_find():
    """In floats all groups are off, in doubles only ``c``."""

    def rounded(removed: Flags) -> Batch:
        return outputs(removed, 0.02 * bool(removed.any()))

    def exact(removed: Flags) -> Batch:
        return outputs(removed, 0.01 * bool(removed[[4, 5]].any()))

    with pytest.raises(ModelError, match="the channels of 'c'"):
        prove(*both(rounded, exact), four(), flags(8, 0, 2, 4, 6))


def test_floats_decide_where_doubles_cannot():
    def off(removed: Flags) -> Batch:
        return outputs(removed, 0.02 * bool(removed.any()))

    def unsupported(removed: Flags) -> Batch:
        raise ModelError("node 'n'", "is not supported", "none")

    with pytest.raises(ModelError, match="the channels of 'a'"):
        prove(*both(off, unsupported), four(), flags(8, 0, 2))


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16"])
def test_a_model_in_doubles_rounds_nowhere(dtype: str):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[N,3] x) => (float[N,3] y) <float[3] b = {{1.0, 2.0, 4.0}}> {{
            c = Constant<value = float {{0.0009765625}}>()
            s = Mul(x, c)
            a = Add(s, b)
            h = Cast<to = {int(ir.DataType[dtype])}>(a)
            y = Cast<to = 1>(h)
        }}""")
    x = np.array([[1e-9, 2e-9, -3e-9]], np.float32)
    found = in_doubles(ir.from_proto(model), {"x": x})["y"]
    assert found.dtype == np.float64
    assert (found - [1, 2, 4])[0] == pytest.approx(x[0] / 1024, rel=1e-3)


def test_mixed_groups_are_left_out_and_named():
    channels = four(mixed="b")
    seen = []

    def sliced(removed: Flags) -> Batch:
        seen.append(np.flatnonzero(removed).tolist())
        return outputs(removed)

    proof = prove(*both(sliced), channels, flags(8, 0, 2, 3))
    assert seen == [[0]]
    assert proof.mixed == {"b": "LayerNormalization"}
    assert "the units of 1 groups that LayerNormalization mixes were not compared" in proof.note(
        False
    )
    only = prove(*both(sliced), channels, flags(8, 2))
    assert only.proved == 0
    assert len(seen) == 1, "nothing to compare"
    assert only.note(False).startswith("no removal could be proved")
