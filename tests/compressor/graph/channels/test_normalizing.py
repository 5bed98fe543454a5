"""Normalizations and reductions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compressor.graph.channels.channel_graphs import (
    Weight,
    checked,
    graph,
    image_net,
    positive,
    row_net,
)

PAIR: dict[str, Weight] = {"scale": (8,), "move": (8,)}


def test_batch_norm():
    text = "z = BatchNormalization(h, scale, move, mean, variance)"
    weights: dict[str, Weight] = {**PAIR, "mean": (8,), "variance": positive(8)}
    channels = checked(image_net(text, weights), 8)
    (group,) = [g for g in channels.groups if not g.frozen]
    roles = {m.parameter: m.role for m in group.members}
    assert roles == {
        "w": "output",
        "b": "bias",
        "head": "input",
        "scale": "norm-scale",
        "move": "norm-shift",
        "mean": "norm-mean",
        "variance": "norm-variance",
    }


def test_a_batch_norm_of_the_input_keeps_what_it_shares():
    text = """
        a = BatchNormalization(x, scale, move, mean, variance)
        c = Conv(h, w2)
        d = BatchNormalization(c, scale, move, mean, variance)
        z = Concat<axis=1>(a, d)
    """
    weights: dict[str, Weight] = {
        **dict.fromkeys(("scale", "move", "mean"), (4,)),
        "variance": positive(4),
        "w2": (4, 8, 1, 1),
    }
    reason = "BatchNormalization 'a' scales values that no layer computes"
    checked(image_net(text, weights), 8, {reason})


@pytest.mark.parametrize(
    ("groups", "wanted", "mixed"), [(4, 4, set()), (8, 8, set()), (1, 0, {"GroupNormalization"})]
)
def test_group_norm(groups: int, wanted: int, mixed: set[str]):
    """Whole groups go; of a single one any channels, which changes the mean of all others."""
    text = f"z = GroupNormalization<num_groups={groups}>(h, scale, move)"
    checked(image_net(text, PAIR), wanted, mixed=mixed)


def test_group_norm_written_as_instance_norm():
    text = """
        r = Reshape(h, parted)
        i = InstanceNormalization(r, ones, zeros)
        s = Shape(h)
        u = Reshape(i, s)
        m = Mul(u, scale)
        z = Add(m, move)
    """
    weights: dict[str, Weight] = {
        "parted": [0, 4, -1],
        "ones": np.ones(4, np.float32),
        "zeros": np.zeros(4, np.float32),
        "scale": (8, 1, 1),
        "move": (8, 1, 1),
    }
    checked(image_net(text, weights), 4)


def test_instance_norm():
    checked(image_net("z = InstanceNormalization(h, scale, move)", PAIR), 8)


def test_a_layer_norm_over_channels_mixes_them():
    weights: dict[str, Weight] = {"scale": (12,), "move": (12,)}
    text = "z = LayerNormalization(h, scale, move)"
    channels = checked(row_net(text, weights), 0, mixed={"LayerNormalization"})
    roles = {m.parameter: m.role for g in channels.groups for m in g.members}
    assert (roles["scale"], roles["move"]) == ("norm-scale", "norm-shift")


def test_a_layer_norm_over_the_features_of_heads_keeps_those():
    text = """
        a = Reshape(h, heads)
        n = LayerNormalization(a, scale, move)
        z = Reshape(n, rows)
    """
    weights: dict[str, Weight] = {
        "heads": [0, 5, 4, 3],
        "scale": (3,),
        "move": (3,),
        "rows": [0, 5, 12],
    }
    # The parameters of the norm are the same for every head: no unit lies on them.
    channels = checked(row_net(text, weights), 4)
    assert "scale" not in channels.parameters


def test_a_layer_norm_over_the_last_axis_does_not_mix_those_of_others():
    text = "z = LayerNormalization(h, scale, move)"
    checked(image_net(text, {"scale": (8,), "move": (8,)}), 8)


def test_the_parameters_of_a_norm_of_the_input_stay():
    model = graph(
        """(float[N,8] x) => (float[N,3] y) {
            n = LayerNormalization(x, scale) h = MatMul(x, w) m = LayerNormalization(h, scale)
            s = Add(n, m) y = MatMul(s, head)
        }""",
        {"scale": (8,), "w": (8, 8), "head": (8, 3)},
    )
    checked(model, 0, {"LayerNormalization 'n' meets 'x', which has no channels"})


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "LpNormalization"])
def test_what_divides_by_all_channels_mixes_them(name: str):
    checked(image_net(f"z = {name}<axis=1>(h)", {}), 0, mixed={name})
    checked(image_net(f"z = {name}<axis=-1>(h)", {}), 8)


REDUCTIONS: dict[str, tuple[str, int, set[str]]] = {
    # Zero adds nothing to a sum, a square or a norm.
    "ReduceSum": ("h", 8, set()),
    "ReduceL1": ("h", 8, set()),
    "ReduceL2": ("h", 8, set()),
    "ReduceSumSquare": ("h", 8, set()),
    "ReduceMean": ("h", 0, {"ReduceMean"}),
    "ReduceMax": ("h", 0, {"ReduceMax"}),
    "ReduceLogSumExp": ("h", 0, {"ReduceLogSumExp"}),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("whole", [0, 1])
def test_reductions_over_channels(name: str, whole: int):
    source, wanted, mixed = REDUCTIONS[name]
    back = "u = Identity(r)" if whole else "u = Unsqueeze(r, one)"
    text = f"r = {name}<keepdims={whole}>({source}, one) {back} t = Tanh(u) z = Mul(h, t)"
    checked(image_net(text, {"one": [1]}), wanted, mixed=mixed)


@pytest.mark.parametrize("whole", [0, 1])
def test_reductions_over_other_axes(whole: int):
    back = "u = Identity(r)" if whole else "u = Unsqueeze(r, ends)"
    text = f"r = ReduceMax<keepdims={whole}>(h, ends) {back} z = Mul(h, u)"
    checked(image_net(text, {"ends": [-1, 2]}), 8)


def test_a_sum_of_what_is_not_zero_is_mixed():
    text = "s = Sigmoid(h) r = ReduceSum<keepdims=1>(s, one) z = Mul(h, r)"
    checked(image_net(text, {"one": [1]}), 0, mixed={"ReduceSum"})


def test_a_reduction_of_no_axes_changes_nothing():
    text = "z = ReduceSum<keepdims=1, noop_with_empty_axes=1>(h)"
    checked(image_net(text, {}), 8)


def test_counting_channels_freezes_them():
    text = "a = ArgMax<axis=1>(h) c = Cast<to=1>(a) z = Mul(h, c)"
    checked(image_net(text, {}), 0, {"ArgMax 'a' counts channels"})
    checked(image_net(text.replace("axis=1", "axis=3"), {}), 8)


def test_running_sums_freeze():
    weights: dict[str, Weight] = {"at": np.asarray(1, np.int64)}
    checked(image_net("z = CumSum(h, at)", weights), 0, {"CumSum 'z' adds up channels"})
    weights = {"at": np.asarray(-1, np.int64)}
    checked(image_net("z = CumSum(h, at)", weights), 8)
