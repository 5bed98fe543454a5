"""PyTorch operators that the exporter has no ONNX for, or hides channels behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.graph.channels.analysis import map_channels
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import Batch
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")

SEEN = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)


def agree(module: nn.Module, *arrays: np.ndarray) -> TorchCarrier:
    """Compare a module with its graph; its inputs are ``a``, ``b``, ..., with a dynamic batch."""
    names = "abc"[: len(arrays)]
    inputs = [
        spec(n, "batch", *a.shape[1:], dtype=a.dtype.name)
        for n, a in zip(names, arrays, strict=True)
    ]
    carrier = TorchCarrier(module, inputs)
    batch: Batch = dict(zip(names, arrays, strict=True))
    graph, wanted = carrier.runner().run(batch).values(), carrier.module_outputs(batch)
    for have, want in zip(graph, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    return carrier


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


class Attentions(nn.Module):
    """Attention of two, three and five axes, with every kind of mask."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 3, 4))
        self.register_buffer("seen", SEEN)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        attend = functional.scaled_dot_product_attention
        five = [x[:, None, None].expand(-1, 2, 2, -1, -1) for x in (a, b)]
        return [
            attend(a[0], b[0], b[0], attn_mask=self.seen),
            attend(a, b, b, scale=0.7),
            attend(a, b, b[..., :5], is_causal=True),
            attend(a, b, b, attn_mask=self.bias[:1]),
            attend(five[0], five[1], five[1], attn_mask=self.bias),
            attend(five[0], five[1], five[1], attn_mask=self.seen),
        ]


def test_attention_of_any_rank_and_mask():
    """The second row of the mask sees nothing, for which PyTorch returns zeros."""
    agree(Attentions(), normal(2, 3, 8), normal(2, 4, 8))


class Biased(nn.Module):
    """Attention with a learned bias, as BEiT's: its kernel depends on whether it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, a: Tensor) -> Tensor:
        q, k, v = self.qkv(a).reshape(-1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[None])
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(-1, 5, 8))
        return result


def test_a_learned_bias_of_attention():
    module = Biased()
    module.out.requires_grad_(False)
    carrier = agree(module, normal(2, 5, 8))
    trained = {name: p.requires_grad for name, p in carrier.module.named_parameters()}
    frozen = {name for name, requires in trained.items() if not requires}
    assert frozen == {"out.weight", "out.bias"}


class Pooled(nn.Module):
    """Channels last, then a mean over all positions, as at the end of Swin and ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 6), nn.Linear(6, 2)
        self.pool, self.line = nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool1d(1)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.inner(self.stem(a).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        y = x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)
        return self.head(self.pool(x).flatten(1)), self.head(self.line(y).flatten(1))


def test_pooling_of_permuted_images_hides_no_channel():
    carrier = agree(Pooled(), normal(2, 3, 5, 5))
    channels = map_channels(carrier.graph())
    assert {stop.op_type for stop in channels.frozen} == {""}  # the outputs
    assert channels.removable.sum() == 8 + 6


class Windows(nn.Module):
    """Views that are not the elements in their order: overlapping rows, and every other one."""

    def forward(self, a: Tensor) -> tuple[Tensor, ...]:
        row = a[0].contiguous()
        return (
            row.as_strided((3, 4), (2, 1)),
            row.as_strided((4,), (2,), 1),
            row.as_strided((2, 1, 3, 1), (3, 7, 1, 5)),
            a.as_strided((1, 8), (8, 1)),
        )


def test_other_strides_are_looked_up():
    agree(Windows(), normal(1, 8))


class Echo(nn.Module):
    """Returns an input, a parameter, and one result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        y = self.layer(a) + b
        return {"y": y, "again": y, "state": b, "bias": self.layer.bias, "b": b}


def test_inputs_parameters_and_one_result_twice_are_outputs():
    carrier = agree(Echo(), normal(2, 3), normal(2, 3))
    assert [value.name for value in carrier.graph().graph.inputs] == ["a", "b"]
    names = ["y", "again", "state", "bias", "output_4"]  # "b" is an input
    assert [value.name for value in carrier.outputs] == names


class Turned(nn.Module):
    """Positions as angles of complex numbers, as in Llama 4, with axes added before and after."""

    def forward(self, a: Tensor) -> list[Tensor]:
        pairs = torch.view_as_complex(a.unflatten(-1, (-1, 2)))
        angles = torch.arange(a.shape[2])[:, None] * torch.tensor([1.0, 0.1])
        turns = torch.polar(torch.ones_like(angles), angles)
        turned = pairs * turns[None, None]
        return [torch.view_as_real(x) for x in (turned, turned.unsqueeze(-1), turned.unsqueeze(-3))]


def test_complex_values_get_axes():
    agree(Turned(), normal(2, 3, 5, 4))


class Bounds(nn.Module):
    """Values between a whole number and a fraction, in all spellings; whole numbers stay whole."""

    def forward(self, a: Tensor) -> list[Tensor]:
        whole = (8 * a).to(torch.int64)
        return [
            a.clamp(0.1, 1),
            torch.clamp(a, min=-1, max=0.5),
            a.clip(0, 0.5),
            (a + 1).clamp_(0, 1.5),
            functional.hardtanh(a, -1, 0.5),
            a.clamp(max=1),
            whole.clamp(0, 5),
            whole.clamp(0.5, 5),
        ]


def test_bounds_of_two_types():
    agree(Bounds(), 2 * normal(3, 5))


class Taken(nn.Module):
    """Integers taken from floats, as masks of ones and zeros are, and floats from floats."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        return [
            (1.0 - a) * -1e4,
            torch.rsub(a.to(torch.int32), 0.5),
            1 - a,
            self.scale * (1.5 - b),
        ]


def test_integers_taken_from_a_float():
    agree(Taken(), np.array([[1, 0, 1, 0]]), normal(1, 4))


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, in both usual spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (
            nn.Parameter(torch.randn(3, 4, 2, 2, dtype=torch.complex64)) for _ in range(2)
        )

    def forward(self, a: Tensor) -> list[Tensor]:
        seen = torch.fft.rfft2(a)
        kept = torch.zeros(a.shape[0], 4, 6, 4, dtype=torch.complex64)
        kept[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", seen[:, :, :2, :2], self.low)
        kept[:, :, -2:, :2] = torch.einsum("bixy,ioxy->boxy", seen[:, :, -2:, :2], self.high)
        return [
            torch.fft.irfft2(kept, s=a.shape[-2:]),
            torch.fft.irfft(seen[..., 0, :2], n=8),  # pads the spectrum
            torch.view_as_real(functional.pad(seen, (1, 0, 0, 2))),
            torch.view_as_real(seen[:, 1]),
        ]


def test_spectra_are_weighted_and_written_into_zeros():
    agree(Spectral(), 0.1 * normal(2, 3, 6, 6))


class Narrow(nn.Module):
    """Looks up and adds by indices of 32 bits, as the inverse of a short-time transform does."""

    def forward(self, a: Tensor) -> list[Tensor]:
        rows, columns = (torch.arange(3, dtype=torch.int32) + i for i in range(2))
        added = torch.zeros_like(a).index_put((rows, columns), a[0, :3], accumulate=True)
        return [a[:, rows, columns], added]


def test_indices_of_32_bits():
    agree(Narrow(), normal(4, 5, 6))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "sum", "amax"])
def test_values_scattered_by_index(reduce: str, include_self: bool):
    """Of a mean the exporter wrote the last value alone, as TAPAS averages over cells."""

    class Scattered(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            empty = a.new_full((a.shape[0], 5), 0.5)
            return empty.scatter_reduce(1, b, a, reduce, include_self=include_self)

    agree(Scattered(), normal(3, 6), np.array([[0, 0, 1, 1, 1, 4]] * 3))


@pytest.mark.parametrize(
    ("rows", "p"), [(4, 2.0), (40, 2.0), (4, 1.0), (4, 3.0), (4, float("inf"))]
)
def test_distances_of_rows(rows: int, p: float) -> None:
    """The exporter has no function for them; codebooks and point clouds are compared by them."""

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.book = nn.Parameter(torch.randn(5, 6))

        def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
            return [torch.cdist(a, b, p), torch.cdist(a, self.book[None], p)]

    agree(Distances(), normal(3, rows, 6), normal(3, 7, 6) + 1)


def test_an_encoder_with_masks_of_padding_and_of_attention() -> None:
    """It was lowered to PyTorch's kernel for inference, which the exporter has no function for."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, a: Tensor) -> Tensor:
            later = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
            padding = a[..., 0] > 1e3
            result: Tensor = self.layers(a, mask=later, src_key_padding_mask=padding)
            return result

    before = torch.backends.mha.get_fastpath_enabled()
    agree(Encoder(), normal(2, 5, 8))
    assert torch.backends.mha.get_fastpath_enabled() == before
