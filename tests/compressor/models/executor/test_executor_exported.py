"""Networks exported by PyTorch, run as graphs."""

from __future__ import annotations

import logging
import warnings

import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.models.executor import GraphModule
from tests.compressor.models.executor.parity import OPSET, by_runtime


class _Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Hardswish(),
            nn.MaxPool2d(3, 2, 1),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.body(image)
        return self.head(features.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(self.embed(tokens)))  # type: ignore[no-any-return]


def _exported(module: nn.Module, name: str, example: torch.Tensor, optimize: bool) -> ir.Model:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            optimize=optimize,
            opset_version=OPSET,
            input_names=[name],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    return program.model


@pytest.mark.parametrize(
    ("kind", "optimize"),
    [
        ("cnn", False),
        ("cnn", True),
        pytest.param("transformer", False, marks=pytest.mark.slow),
        ("transformer", True),
    ],
)
def test_exported_networks(kind: str, optimize: bool) -> None:
    torch.manual_seed(0)
    network = (_Cnn() if kind == "cnn" else _Block()).eval()
    name = "image" if kind == "cnn" else "tokens"
    example = torch.randn(2, 3, 16, 16) if kind == "cnn" else torch.randint(0, 30, (2, 7))
    model = _exported(network, name, example, optimize)
    module = GraphModule(model)
    # Another batch than the one that was exported.
    inputs = torch.cat([example, example[:1]])
    (result,) = module(inputs).values()
    torch.testing.assert_close(result, network(inputs), rtol=1e-4, atol=1e-5)
    if optimize:
        (served,) = by_runtime(ir.to_proto(model), {name: inputs.numpy()})
        torch.testing.assert_close(result, torch.from_numpy(served), rtol=1e-4, atol=1e-5)
    names = {key for key, _ in network.named_parameters()}
    assert names & set(module.state_dict())
    # No shape may have left the CPU: the meta device has no values that could be read.
    (shaped,) = module.to("meta")(inputs.to("meta")).values()
    assert shaped.shape == result.shape
