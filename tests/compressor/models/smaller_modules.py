"""Networks that lose channels, and the same done to them by hand."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import held_tensors
from compressor.models.torch.size_attributes import Attributes
from compressor.models.torch.smaller_module import set_attributes
from compressor.types.channels import Units
from compressor.types.tensors import Array, TensorSpec

Kept = Mapping[str, Mapping[int, Units]]


def at(*positions: int) -> Units:
    return np.array(positions, np.int64)


def heads(kept: list[int], size: int, parts: int = 1, total: int = 0) -> Units:
    """Return the positions of whole heads, in each of several parts of ``total`` channels."""
    one = np.concatenate([np.arange(head * size, (head + 1) * size) for head in kept])
    return np.concatenate([one + part * total for part in range(parts)])


def cut(module: nn.Module, kept: Kept, sizes: Attributes) -> nn.Module:
    """Remove channels by hand: tensors are cut in place of a copy, sizes set as they are given."""
    small = deepcopy(module)
    held = held_tensors(small)
    for name, axes in kept.items():
        for axis, positions in axes.items():
            held[name].data = held[name].data.index_select(axis, torch.from_numpy(positions))
    set_attributes(small, sizes)
    return small


def lowered_cut(
    module: nn.Module, inputs: tuple[TensorSpec, ...], kept: Kept, sizes: Attributes
) -> ir.Model:
    """Return the graph of the module that was cut by hand."""
    return TorchCarrier(cut(module, kept, sizes), inputs).graph()


def shaken(module: nn.Module) -> nn.Module:
    """Draw all that a module holds, the statistics of its norms too."""
    generator = torch.Generator().manual_seed(4)
    for name, tensor in held_tensors(module).items():
        if tensor.is_floating_point():
            low, high = (0.5, 1.5) if "var" in name else (-0.6, 0.6)
            tensor.data.uniform_(low, high, generator=generator)
    return module.eval()


def worst(found: Array, wanted: Array) -> float:
    """Return the largest difference, relative to the largest value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


class Chain(nn.Module):
    """Convolutions of every kind, each norm, and a list of lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 12, 1, groups=4)
        self.group_norm = nn.GroupNorm(4, 12)
        self.slope = nn.PReLU(12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2, groups=2)
        self.lengths = [2, 4]
        self.layer_norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(image)))
        x = self.slope(self.group_norm(self.grouped(self.depthwise(x))))
        left, right = self.up(x).mean((2, 3)).split(self.lengths, 1)
        result: Tensor = self.head(self.layer_norm(torch.cat([left.exp(), right], 1)))
        return result


CHAIN = (TensorSpec("image", ("batch", 3, 8, 8), "float32"),)
CHAIN_KEPT: Kept = {
    # two of the four groups of the grouped convolution go: channels 2-3 and 6-7, then 3-5 and 9-11
    "first.weight": {0: at(0, 1, 4, 5)},
    **{f"norm.{n}": {0: at(0, 1, 4, 5)} for n in ("weight", "bias")},
    **{f"norm.running_{n}": {0: at(0, 1, 4, 5)} for n in ("mean", "var")},
    "depthwise.weight": {0: at(0, 1, 4, 5)},
    "depthwise.bias": {0: at(0, 1, 4, 5)},
    "grouped.weight": {0: at(0, 1, 2, 6, 7, 8)},
    "grouped.bias": {0: at(0, 1, 2, 6, 7, 8)},
    **{f"group_norm.{n}": {0: at(0, 1, 2, 6, 7, 8)} for n in ("weight", "bias")},
    "slope.weight": {0: at(0, 1, 2, 6, 7, 8)},
    # of the transposed one, one channel in each group goes: 1 and 4
    "up.weight": {0: at(0, 1, 2, 6, 7, 8), 1: at(0, 2)},
    "up.bias": {0: at(0, 2, 3, 5)},
    **{f"layer_norm.{n}": {0: at(0, 2, 3, 5)} for n in ("weight", "bias")},
    "head.weight": {1: at(0, 2, 3, 5)},
}
CHAIN_SIZES: Attributes = {
    "first": {"out_channels": 4},
    "norm": {"num_features": 4},
    "depthwise": {"in_channels": 4, "out_channels": 4, "groups": 4},
    "grouped": {"in_channels": 4, "out_channels": 6, "groups": 2},
    "group_norm": {"num_channels": 6, "num_groups": 2},
    "slope": {"num_parameters": 6},
    "up": {"in_channels": 6, "out_channels": 4},
    "": {"lengths": [1, 3]},
    "layer_norm": {"normalized_shape": (4,)},
    "head": {"in_features": 4},
}


class Free(nn.Module):
    """Hidden units, a batch norm, tied weights and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.back = nn.Linear(8, 6)
        self.back.weight = self.down.weight
        self.register_buffer("shift", torch.zeros(8), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.up(x))) + self.shift

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x)
        return self.down(y) + self.back(torch.tanh(y))


class Rigid(Free):
    """The same function, with the width written into it."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x).reshape(-1, 8)


class Shaped(nn.Module):
    """Looks like rows of the width that a configuration states; holds no tensor."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.config.hidden_size)


class Configured(Free):
    """The width is read out of a configuration, as modules of ``transformers`` do, two deep.

    ``pair_token_id`` is a number of it that is no size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=8, pair_token_id=2)
        self.shape = nn.ModuleList([Shaped(self.config)])

    def hidden(self, x: Tensor) -> Tensor:
        rows: Tensor = self.shape[0](super().hidden(x))
        return rows * (self.config.pair_token_id / 2)


VECTOR = (TensorSpec("x", ("batch", 6), "float32"),)


def hidden_kept(*positions: int) -> Kept:
    """Keep some of the hidden units."""
    here = at(*positions)
    norm = {f"norm.{n}": {0: here} for n in ("weight", "bias", "running_mean", "running_var")}
    return {
        "up.weight": {0: here},
        "up.bias": {0: here},
        **norm,
        "shift": {0: here},
        "down.weight": {1: here},
    }


@cache
def free_graph(*positions: int) -> ir.Model:
    """Return the graph of ``Free`` with some of its hidden units."""
    return lowered_cut(shaken(Free()), VECTOR, hidden_kept(*positions), {})


def smaller(module: nn.Module, *positions: int) -> TorchCarrier:
    """Remove hidden units from ``Free`` or ``Rigid``."""
    kept = hidden_kept(*positions)
    after = TorchCarrier(module, VECTOR).with_channels(free_graph(*positions), kept)
    assert isinstance(after, TorchCarrier)
    return after
