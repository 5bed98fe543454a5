"""Mixtures of experts of ``transformers`` are lowered, and compute what the library does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.experts import plain_experts
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")

transformers = pytest.importorskip("transformers")


def experts(kind: str, **sizes: Any) -> nn.Module:
    """Return the experts of one layer: four of them, of which each token is sent to two."""
    model = {"GptOss": "gpt_oss", "Mixtral": "mixtral"}[kind]
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, **sizes
    )
    config._experts_implementation = "grouped_mm"
    modeling = getattr(transformers.models, model)
    network: nn.Module = getattr(modeling, f"modeling_{model}").__dict__[f"{kind}Experts"](config)
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


class Routed(nn.Module):
    """Experts behind a router."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), network

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = torch.topk(self.router(x).softmax(-1), 2)
        mixed: Tensor = self.experts(x, chosen, shares)
        return mixed


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])  # gated by halves; by turns, with biases
def test_graph_and_module_agree(kind: str) -> None:
    carrier = TorchCarrier(Routed(experts(kind)), [spec("x", "tokens", 8)])
    batch = {"x": np.random.default_rng(1).standard_normal((9, 8)).astype(np.float32)}
    (have,), (want,) = carrier.runner().run(batch).values(), carrier.module_outputs(batch)
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


class RoutedRows(nn.Module):
    """The experts of DBRX behind a router, which are given samples and not tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.dbrx import configuration_dbrx, modeling_dbrx

        config = configuration_dbrx.DbrxFFNConfig(
            hidden_size=8, ffn_hidden_size=12, moe_num_experts=4
        )
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 4), modeling_dbrx.DbrxExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = torch.topk(self.router(x.reshape(-1, 8)).softmax(-1), 2)
        mixed: Tensor = self.experts(x, chosen, shares)
        return mixed


def test_graph_and_module_agree_on_experts_in_rows() -> None:
    carrier = TorchCarrier(RoutedRows(), [spec("x", "batch", 5, 8)])
    batch = {"x": np.random.default_rng(1).standard_normal((3, 5, 8)).astype(np.float32)}
    (have,), (want,) = carrier.runner().run(batch).values(), carrier.module_outputs(batch)
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def test_the_library_computes_again_afterwards() -> None:
    module = Routed(experts("Mixtral"))
    with plain_experts(module):
        assert "forward" in vars(module.experts)
    assert "forward" not in vars(module.experts)
