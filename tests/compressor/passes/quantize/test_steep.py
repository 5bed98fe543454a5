"""Layers that stay floats because a root or a logarithm follows: those of spectra."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.passes.quantize.static_models import ORT, outputs, sqnr, statistics

BINS, LENGTH = 16, 32
SOUND = TensorSpec("sound", ("batch", 1, 256), "float32")
DEFAULT = QuantizeStatic()
EVERY = QuantizeStatic(layers=(StaticRule(match="*"),))


class Spectrum(nn.Module):
    """A Fourier transform as a convolution, what is made of it, and a layer that reads that."""

    def __init__(self, made: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        angles = 2 * np.pi * np.outer(np.arange(BINS), np.arange(LENGTH)) / LENGTH
        basis = np.concatenate([np.cos(angles), np.sin(angles)]) * np.hanning(LENGTH)
        self.fourier = nn.Conv1d(1, 2 * BINS, LENGTH, LENGTH // 2, bias=False)
        self.fourier.weight.data = torch.tensor(basis[:, None], dtype=torch.float32)
        self.bands = nn.Linear(BINS, BINS, bias=False)
        self.bands.weight.data.abs_()
        self.head = nn.Conv1d(BINS, 4, 1)
        self.made = made

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.made(self.fourier(sound), self.bands))


def magnitude(x: Tensor, _: nn.Module) -> Tensor:
    real, imaginary = x[:, :BINS], x[:, BINS:]
    return (real**2 + imaginary * imaginary).sqrt()


def decibels(x: Tensor, bands: nn.Module) -> Tensor:
    power = x.square().unflatten(1, (2, BINS)).sum(1)
    return bands(power.transpose(1, 2)).clamp(min=1e-6).log().transpose(1, 2)


def normalized(x: Tensor, _: nn.Module) -> Tensor:
    """A root divides by itself what it was made of: no small value grows."""
    return (x / (x.square().mean(1, keepdim=True) + 1e-3).sqrt())[:, :BINS]


def power(x: Tensor, _: nn.Module) -> Tensor:
    return x[:, :BINS] ** 2 + x[:, BINS:] ** 2


def rooted_later(x: Tensor, bands: nn.Module) -> Tensor:
    """Without a square, the first layer's roundings cancel out in the second's sums."""
    return bands(x[:, :BINS].transpose(1, 2)).relu().sqrt().transpose(1, 2)


def carrier(made: Callable[[Tensor, nn.Module], Tensor]) -> Carrier:
    torch.manual_seed(0)
    return Fuse().apply(TorchCarrier(Spectrum(made), [SOUND]), ORT, {}).carrier


def kept(model: Carrier, declared: QuantizeStatic = DEFAULT) -> set[str]:
    plans = declared.survey(model, ORT).layers
    return {x.name for x in plans if "a root or a logarithm" in x.reason}


def sound(seed: int) -> Batch:
    """Noise whose low tones are 40 dB above the high ones."""
    noise = np.random.default_rng(seed).standard_normal((8, 1, 300)).cumsum(-1).cumsum(-1)
    smooth = noise - noise.mean(-1, keepdims=True)
    return {"sound": (smooth[..., 44:] / np.abs(smooth).max()).astype(np.float32)}


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (magnitude, {"fourier"}),
        (decibels, {"fourier", "bands"}),
        (normalized, set()),
        (power, set()),
        (rooted_later, {"bands"}),
    ],
)
def test_what_ends_in_a_root_or_a_logarithm_stays_float(made, names):
    assert kept(carrier(made)) == names


def test_a_rule_quantizes_it_all_the_same():
    assert kept(carrier(magnitude), EVERY) == set()


def test_small_values_of_a_spectrum_are_kept():
    """Measured: 50.5 dB in place of 34.4."""
    model = carrier(magnitude)
    errors = []
    for declared in (DEFAULT, EVERY):
        found = statistics(declared, model, ORT, [sound(seed) for seed in range(4)])
        after = declared.apply(model, ORT, found).carrier
        errors.append(sqnr(outputs(model, sound(9)), outputs(after, sound(9))))
    assert errors[0] > errors[1] + 6
