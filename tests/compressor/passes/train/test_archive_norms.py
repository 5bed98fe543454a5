"""Batch norms of ``archive``: trained by batches, coded as a scale and a shift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.train.archive.coded_network import CodedNetwork, coded_network
from compressor.passes.train.archive.live_norms import inner_biases, live_norms, move_biases
from compressor.types.carrier import Carrier
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.train.small_qat import block
from tests.compressor.passes.train.test_archive_pass import searched

IMAGES = np.random.default_rng(0).normal(size=(16, 2, 6, 6)).astype(np.float32)


def fused(carrier: TorchCarrier) -> Carrier:
    """Return the network with its norms, and no biases before them."""
    graph = Fuse(batch_norm=False).fused(carrier.graph(), lowered=True).computed()
    move_biases(graph)
    return carrier.with_graph(graph)


def coded(carrier: TorchCarrier, inner: Carrier, float_bits: int = 24) -> CodedNetwork:
    """Return the network with codebooks of 255 values."""
    layers = {layer.weight: layer for layer in inner.layers()}
    return coded_network(inner.graph(), layers, carrier.trainable(), 8, float_bits)


def outputs(network: CodedNetwork) -> np.ndarray:
    with torch.no_grad():
        (found,) = network.module(x=torch.from_numpy(IMAGES)).values()
    return found.numpy()


def test_a_bias_before_a_norm_is_none() -> None:
    carrier = block()
    inner = fused(carrier)
    assert inner_biases(inner.graph()) == {"stem.bias": "bn1.running_mean"}
    assert not inner.tensors()["stem.bias"].read().any()
    ours, theirs = (x.runner().run({"x": IMAGES}) for x in (inner, carrier))
    for name, output in theirs.items():
        np.testing.assert_allclose(ours[name], output, rtol=1e-4, atol=1e-5)
    assert "stem.bias" not in coded(carrier, inner).vectors


def test_norms_are_written_as_scales_and_shifts() -> None:
    carrier = block()
    inner = fused(carrier)
    network = coded(carrier, inner)
    assert len(network.norms) == 2
    assert not {name for norm in network.norms for name in norm.names} & set(network.coded)
    for _ in range(30):  # statistics follow the batches
        before = outputs(network)
    network.module.eval()
    after = outputs(network)
    assert not np.allclose(before, after, rtol=1e-3), "batches normalize while it is trained"
    bare = network.nbytes()
    network.shorten()
    assert bare < network.nbytes() < bare + 4 * 8 * 4
    written = network.written(inner)
    (theirs,) = written.runner().run({"x": IMAGES}).values()
    np.testing.assert_allclose(after, theirs, rtol=0.05, atol=0.02)
    tensors = {name: stored.read() for name, stored in written.tensors().items()}
    assert not {norm.mean for norm in network.norms} & tensors.keys()
    assert not tensors["mean_8"].any(), "both norms have it"
    assert torch.equal(tensors["variance_8"], torch.full((8,), 1 - 1e-5))
    again = coded(carrier, inner)
    again.load(network.state())
    assert again.short.keys() == network.short.keys()
    (same,) = again.written(inner).runner().run({"x": IMAGES}).values()
    np.testing.assert_array_equal(same, theirs)


def test_a_channel_that_hardly_varies_leaves_the_others_their_scales() -> None:
    """Its scale is hundreds of times theirs."""
    carrier = block()
    network = coded(carrier, fused(carrier), float_bits=5)
    (norm, *_) = network.norms
    with torch.no_grad():
        network.module.state_dict()["module." + norm.variance][3] = 0.0
    network.shorten()
    held = {n.removeprefix("module."): t for n, t in network.module.state_dict().items()}
    exact = held[norm.weight] * norm.factor(held)
    assert exact[3] > 50 * exact[:3].abs().max()
    torch.testing.assert_close(network.short[norm.weight], exact, rtol=1 / 32, atol=0)


class Twice(nn.Module):
    """A layer and its norm that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, H, W]`` to as much."""
        y = torch.relu(self.norm(self.conv(x)))
        found: Tensor = self.norm(self.conv(y))
        return found


def test_a_norm_that_is_called_twice_is_one() -> None:
    specs = (TensorSpec("x", ("N", 2, 6, 6), "float32"),)
    carrier = TorchCarrier(Twice().eval(), specs)
    inner = fused(carrier)
    assert len(live_norms(inner.graph())) == 1
    assert not inner_biases(inner.graph())
    network = coded(carrier, inner)
    network.module.eval()
    network.shorten()
    (theirs,) = network.written(inner).runner().run({"x": IMAGES}).values()
    np.testing.assert_allclose(outputs(network), theirs, rtol=0.05, atol=0.02)


def test_a_search_trains_norms_by_batches(tmp_path: Path) -> None:
    found = searched(tmp_path, rounds=1).carrier
    tensors = {name: stored.read() for name, stored in found.tensors().items()}
    assert not tensors["stem.bias"].any()
    assert torch.equal(tensors["variance_8"], torch.full((8,), 1 - 1e-5))
