"""What integer attributes are taken for when channels go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from compressor.models.torch.size_attributes import Attributes, Value, readings

HEADS = np.repeat([True, False, False, True], 8)
"""Two of four heads of eight channels."""
EVEN = np.tile([True, True, False, True], 8)
"""Six of each eight channels."""
LOOSE = np.arange(32) % 7 != 2
NARROW = HEADS & EVEN
"""Six channels of each of two heads."""


class Layer(nn.Module):
    """A linear layer from 32 to 32, with one attribute."""

    def __init__(self, name: str, value: Value) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)
        setattr(self, name, value)


def first(name: str, value: Value, mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Value:
    """Return the value in the likeliest reading; outputs of the linear layer go."""
    module = Layer(name, value)
    reading = next(readings(module, {id(module.linear.weight): {0: mask}}))
    assert reading["linear"] == {"out_features": int(mask.sum())}
    return reading.get("", {}).get(name, value)


@pytest.mark.parametrize(
    ("name", "value", "mask", "wanted"),
    [
        ("num_heads", 4, HEADS, 2),
        ("n_head", 4, HEADS, 2),
        ("num_heads", 4, EVEN, 4),
        ("head_dim", 8, HEADS, 8),
        ("head_dim", 8, EVEN, 6),
        ("num_heads", 4, NARROW, 2),
        ("head_dim", 8, NARROW, 6),
        ("head_dim", 32, LOOSE, int(LOOSE.sum())),  # of the only head
        ("num_key_value_groups", 2, HEADS, 2),
        ("all_head_size", 32, HEADS, 16),
        ("inner_dim", 32, LOOSE, int(LOOSE.sum())),
        ("embed_dim", 32, LOOSE, 32),  # the width of what comes in, more likely
        ("kernel_size", 2, np.tile([True, False], 16), 2),
        ("layer_idx", 4, HEADS, 4),
        ("before", 10, LOOSE, 8),
        ("after", 3, LOOSE, 2),
        ("sizes", [8, 24], HEADS, [8, 8]),
        ("sizes", (8, 25), HEADS, (8, 25)),
        ("hidden_sizes", [16, 32, 64], LOOSE, [16, int(LOOSE.sum()), 64]),
        ("count", 5, HEADS, 5),
        ("flag", True, np.arange(32) > 0, True),
    ],
)
def test_the_likeliest_reading(
    name: str, value: Value, mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], wanted: Value
) -> None:
    found = first(name, value, mask)
    assert found == wanted
    assert type(found) is type(wanted)


def test_heads_and_their_width_are_read_on_one_axis() -> None:
    """One of two heads goes, and by chance as much of either half of what they read."""
    module = Layer("head_dim", 16)
    module.num_heads = 2
    lost, halves = np.arange(32) < 16, np.tile([True, False], 16)
    masks = {id(module.linear.weight): {0: lost, 1: halves}}
    assert next(readings(module, masks))[""] == {"num_heads": 1}


def test_other_readings_follow() -> None:
    module = Layer("embed_dim", 32)
    found = [
        reading.get("", {}).get("embed_dim", 32)
        for reading in readings(module, {id(module.linear.weight): {0: HEADS}})
    ]
    assert found == [32, 16]


def test_a_module_without_tensors_looks_around() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (6, 1)), Layer("x", 1))
    module.add_module("norm", nn.LayerNorm(6, elementwise_affine=False))
    mask = np.array([True, True, False, True, False, True])
    reading = next(readings(module, {id(module[0].weight): {0: mask}}))
    assert reading == {
        "0": {"out_features": 4},
        "1": {"unflattened_size": (4, 1)},
        "norm": {"normalized_shape": (4,)},
    }


def test_containers_are_looked_through() -> None:
    module = Layer("num_heads", 4)
    linear = module.linear
    module.linear = nn.Sequential(linear, nn.Dropout())
    reading = next(readings(module, {id(linear.weight): {0: HEADS}}))
    assert reading == {"linear.0": {"out_features": 16}, "": {"num_heads": 2}}


def test_layers_of_one_class_are_read_alike() -> None:
    module = nn.ModuleList(Layer("head_dim", 8) for _ in range(3))
    masks = {id(layer.linear.weight): {0: HEADS} for layer in module}
    found: list[Attributes] = list(readings(module, masks))
    for reading in found:
        own = [reading.get(str(index), {}) for index in range(3)]
        assert own[0] == own[1] == own[2]
    assert {reading.get("1", {}).get("head_dim", 8) for reading in found} == {8, 4}


@pytest.mark.parametrize(
    ("layer", "axis", "mask", "wanted"),
    [
        (nn.Linear(4, 3), 1, [1, 0, 1, 1], {"in_features": 3}),
        (nn.Embedding(3, 4), 1, [1, 0, 1, 1], {"embedding_dim": 3}),
        (nn.Conv1d(4, 6, 3), 1, [1, 0, 1, 1], {"in_channels": 3}),
        (nn.Conv1d(4, 4, 3, groups=2), 1, [1, 0], {"in_channels": 2}),
        (nn.Conv1d(4, 4, 3, groups=2), 0, [0, 1, 1, 0], {"out_channels": 2}),
        (
            nn.Conv1d(4, 4, 3, groups=2),
            0,
            [0, 0, 1, 1],
            {"in_channels": 2, "out_channels": 2, "groups": 1},
        ),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), 1, [1, 0, 1], {"out_channels": 4}),
        (nn.BatchNorm3d(4, affine=False), 0, [1, 0, 1, 1], {"num_features": 3}),
        (nn.RMSNorm(4), 0, [1, 0, 1, 1], {"normalized_shape": (3,)}),
        (nn.GroupNorm(2, 4), 0, [1, 1, 0, 0], {"num_groups": 1, "num_channels": 2}),
        (nn.GroupNorm(2, 4), 0, [1, 0, 0, 1], {"num_channels": 2}),
    ],
)
def test_known_layers(
    layer: nn.Module, axis: int, mask: list[int], wanted: dict[str, Value]
) -> None:
    tensor = getattr(layer, "weight", None)
    tensor = layer.get_buffer("running_mean") if tensor is None else tensor
    masks = {id(tensor): {axis: np.array(mask, dtype=bool)}}
    assert list(readings(layer, masks)) == [{"": wanted}]


def test_the_axis_of_a_parametrization_is_no_size() -> None:
    module = nn.Sequential(nn.Conv1d(6, 6, 4))
    nn.utils.parametrizations.weight_norm(module[0], dim=2)
    weight = module[0].parametrizations.weight.original1
    gone = np.tile([True, False, False], 2)
    found = list(readings(module, {id(weight): {0: gone}}))
    assert all(reading["0"] == {"out_channels": 2} for reading in found)
    assert not [path for reading in found for path in reading if "parametrizations" in path]


def test_nothing_is_read_where_nothing_goes() -> None:
    assert list(readings(Layer("num_heads", 4), {})) == [{}]
    assert list(readings(torch.nn.Identity(), {})) == [{}]
