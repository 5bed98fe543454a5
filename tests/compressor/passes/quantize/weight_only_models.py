"""Small networks and data for tests of quantize-weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from compressor.graph.blocks import partition
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.run.blocks.blockwise import Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.layers import QuantizedTensor
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.passes.quantize.static_models import Given

TOKENS = TensorSpec("tokens", ("batch", "sequence"), "int64")
VECTOR = TensorSpec("x", ("batch", 64), "float32")
ANY = PassContext()
TENSORRT = PassContext(0, frozenset({"tensorrt"}))
WIDTH, INNER, WORDS = 64, 128, 19


class Language(nn.Module):
    """Two gated residual blocks between a table and an output layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for norm, gate, up, down in zip(self.norms, self.gate, self.up, self.down, strict=True):
            y = norm(x)
            x = x + down(torch.sigmoid(gate(y)) * up(y))
        return self.lm_head(x)


class Mixed(nn.Module):
    """A convolution, a transposed one, and layers of unlike widths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.wide = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.fc = nn.Linear(100, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.wide(torch.relu(self.depth(torch.relu(self.conv(image)))))
        x = nn.functional.adaptive_avg_pool2d(x.mean(1, keepdim=True), (10, 10)).flatten(1)
        return self.last(torch.relu(self.fc(x)))


IMAGE = TensorSpec("image", ("batch", 3, 10, 10), "float32")


def carrier(module: nn.Module, spec: TensorSpec = TOKENS) -> Carrier:
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif "norm" in name and name.endswith("weight"):  # a few channels are far larger
            nn.init.uniform_(parameter, 0.3, 1)
            with torch.no_grad():
                parameter[:3] *= 30
        else:
            nn.init.normal_(parameter, std=0.1)
    return TorchCarrier(module, [spec])


def batches(count: int = 4, seed: int = 0) -> list[Batch]:
    random = np.random.default_rng(seed)
    return [{"tokens": random.integers(0, WORDS, (8, 16))} for _ in range(count)]


def images(count: int = 4) -> list[Batch]:
    random = np.random.default_rng(0)
    return [{"image": random.standard_normal((4, 3, 10, 10), np.float32)} for _ in range(count)]


def weights(**options: object) -> QuantizeWeights:
    return QuantizeWeights.model_validate(options, strict=False)


def plan(declared: QuantizeWeights, model: Carrier, context: PassContext = ANY) -> dict[str, str]:
    return {row.name: row.action for row in declared.survey(model, context).layers}


def reasons(declared: QuantizeWeights, model: Carrier) -> dict[str, str]:
    return {row.name: row.reason for row in declared.survey(model, ANY).layers}


def quantized(
    declared: QuantizeWeights,
    model: Carrier,
    folder: Path,
    data: list[Batch] | None = None,
    context: PassContext = ANY,
) -> Outcome:
    survey = declared.survey(model, context)
    if not declared.by_block:
        assert not survey.requests
        return declared.apply(model, context, {})
    graph = model.graph()
    data = data or batches()
    feed = Feed(data, folder)
    blocks = GraphBlocks(graph, partition(graph), survey.requests, feed)
    return declared.apply(model, replace(context, blocks=blocks, samples=Given(data)), {})


def codes(model: Carrier) -> dict[str, QuantizedTensor]:
    return {
        name: tensor.codes.compute(tensor.codes.layer.canonical(tensor.read()))
        for name, tensor in model.tensors().items()
        if tensor.codes is not None
    }


def error(model: Carrier, other: Carrier) -> float:
    """Relative squared error of the outputs on data that was not calibrated with."""
    batch = batches(1, seed=9)[0]
    want, found = (next(iter(m.runner().run(batch).values())) for m in (model, other))
    return float(np.square(want - found).sum() / np.square(want).sum())


def same(first: QuantizedTensor, second: QuantizedTensor) -> None:
    assert first.scheme == second.scheme
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)
    assert torch.equal(first.zero_point, second.zero_point)
