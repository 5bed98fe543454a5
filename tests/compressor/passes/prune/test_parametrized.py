"""Weights that PyTorch's parametrizations compute are ranked and solved like plain ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.models.smaller_modules import worst
from tests.compressor.passes.prune.structured_models import Given, declared, pruned

INPUTS = (TensorSpec("image", ("batch", 3, 8, 8), "float32"),)
KINDS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


class Net(nn.Module):
    def __init__(self, made: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a = made(nn.Conv2d(3, 16, 3, padding=1))
        self.b = made(nn.Conv2d(16, 12, 3, padding=1))
        self.head = made(nn.Linear(12, 5))

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(image)))).mean((2, 3))
        logits: Tensor = self.head(x)
        return logits


class Decoder(nn.Module):
    """What is removed is read by transposed convolutions alone, which are not solved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ConvTranspose2d(3, 16, 2, 2)
        self.b = nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(image)))
        return out


def images(samples: int = 64) -> Batch:
    rng = np.random.default_rng(0)
    return {"image": rng.standard_normal((samples, 3, 8, 8)).astype(np.float32)}


def parametrized(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(KINDS[kind]).eval()


def plain(module: nn.Module) -> nn.Module:
    module = deepcopy(module)
    for part in module.modules():
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_loses_what_it_loses_without_them(kind: str) -> None:
    step, given = declared(target={"macs": 0.5}), Given((images(),))
    wholes = [TorchCarrier(m, INPUTS) for m in (parametrized(kind), plain(parametrized(kind)))]
    survey = step.survey(wholes[0], PassContext(shapes={"image": (64, 3, 8, 8)}))
    assert not [note for note in survey.notes if "not solved" in note]
    ours, theirs = (pruned(step, whole, given) for whole in wholes)
    assert any("layers that a removal changes were solved" in note for note in ours.notes)
    outputs = [next(iter(o.carrier.runner().run(images()).values())) for o in (ours, theirs)]
    assert worst(outputs[0], outputs[1]) < 1e-3
    assert isinstance(ours.carrier, TorchCarrier)
    assert (type(ours.carrier.module) is Net) == (kind == "weight norm")
    replaced = [note for note in ours.notes if "a module that executes the graph" in note]
    assert bool(replaced) == ours.carrier.executes_graph


def test_a_weight_is_written_through_its_parametrization_where_that_gives_it() -> None:
    carriers = {kind: TorchCarrier(parametrized(kind), INPUTS) for kind in KINDS}
    weight = torch.randn(12, 16, 3, 3, generator=torch.Generator().manual_seed(1))
    changed = {kind: c.with_weights({"b.weight": weight}) for kind, c in carriers.items()}
    for after in changed.values():
        assert isinstance(after, TorchCarrier)
        (layer,) = (layer for layer in after.layers() if layer.name == "b")
        assert torch.allclose(after.weight(layer), weight, rtol=1e-5, atol=1e-6)
        (output,) = after.runner().run(images(2)).values()
        assert worst(output, after.module_outputs(images(2))[0]) < 1e-5
    # Of spectral norm, all weights have the norm 1.
    stays = [isinstance(c, TorchCarrier) and not c.executes_graph for c in changed.values()]
    assert stays == [True, False]


def test_a_weight_with_zeros_gets_a_parameter_of_its_own() -> None:
    """Training keeps zeros of parameters zero."""
    weight = torch.ones(12, 16, 3, 3)
    weight[:, 0] = 0
    after = TorchCarrier(parametrized("weight norm"), INPUTS).with_weights({"b.weight": weight})
    assert "b.weight" in after.tensors()


@pytest.mark.parametrize("criterion", [None, "reconstruction"])
def test_where_no_reader_can_be_solved_channels_are_ranked_by_norms(criterion: str | None) -> None:
    torch.manual_seed(0)
    whole, given = TorchCarrier(Decoder(), INPUTS), Given((images(),))
    target = {"macs": 0.5}
    ours = pruned(declared(target=target, criterion=criterion), whole, given)
    by_norm = pruned(declared(target=target, criterion="l2"), whole, given)
    shapes = [{n: t.shape for n, t in o.carrier.tensors().items()} for o in (ours, by_norm)]
    assert shapes[0] == shapes[1]
    said = " ".join(ours.notes)
    assert "no layer was solved: none that a removal changes can be" in said
    assert "nothing was gained" not in said
    assert "the layers that read them solved" not in said
