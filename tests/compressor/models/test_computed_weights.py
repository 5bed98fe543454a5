"""Weights that a module computes of its parameters: its layers are found, coded and pruned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from compressor.models.layer_uses import computed_weights
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.models.smaller_modules import worst
from tests.compressor.passes.prune.structured_models import Given, declared, pruned
from tests.zoo_pruning import reload_errors

INPUTS = (TensorSpec("image", ("batch", 3, 8, 8), "float32"),)


class Standardized(nn.Conv2d):
    """A convolution whose filters have mean 0, variance 1 and a learned gain, as in NFNets."""

    def __init__(self, read: int, written: int) -> None:
        super().__init__(read, written, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(written) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        unit = functional.batch_norm(flat, None, None, self.gain * 0.3, training=True, eps=1e-6)
        return functional.conv2d(x, unit.reshape_as(self.weight), self.bias, padding=1)


def parametrized(read: int, written: int) -> nn.Module:
    return parametrizations.weight_norm(nn.Conv2d(read, written, 3, padding=1))


def spectral(read: int, written: int) -> nn.Module:
    return spectral_norm(nn.Conv2d(read, written, 3, padding=1))


class Net(nn.Module):
    """Two convolutions of a kind, and a linear layer."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.head = kind(3, 8), kind(8, 12), nn.Linear(12, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(image)))).mean((2, 3))
        logits: Tensor = self.head(x)
        return logits


NAMES = {Standardized: "{}.computed", parametrized: "{}", spectral: "{}"}


@cache
def carrier(kind: Callable[[int, int], nn.Module]) -> TorchCarrier:
    torch.manual_seed(0)
    return TorchCarrier(Net(kind), INPUTS)


def images() -> Batch:
    rng = np.random.default_rng(0)
    return {"image": rng.standard_normal((3, 3, 8, 8)).astype(np.float32)}


def output(model: Carrier) -> np.ndarray:
    (array,) = model.runner().run(images()).values()
    return array


@pytest.mark.parametrize("kind", NAMES)
def test_layers_are_found(kind: Callable[[int, int], nn.Module]) -> None:
    model = carrier(kind)
    wanted = [NAMES[kind].format(name) for name in "ab"]
    layers = {layer.name: layer for layer in model.layers()}
    assert [name for name in layers if name != "head"] == wanted
    assert [layers[name].shape for name in wanted] == [(8, 3, 3, 3), (12, 8, 3, 3)]
    assert len(model.graph().graph) < len(model.lowered.graph)
    assert worst(output(model), model.module_outputs(images())[0]) < 1e-5


def test_they_become_codes_without_fuse() -> None:
    model, step = carrier(Standardized), QuantizeWeights(bits=8)
    plan = {row.name: row for row in step.survey(model, PassContext()).layers}
    assert plan["b.computed"].touched
    coded = step.apply(model, PassContext(), {}).carrier
    assert worst(output(coded), output(model)) < 0.05
    assert (output(coded) != output(model)).any()


class Looped(nn.Module):
    """A convolution of a kind that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.step, self.head = nn.Conv2d(3, 8, 1), parametrized(8, 8), nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for _ in range(3):
            x = x + torch.relu(self.step(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def test_a_layer_that_is_called_several_times_has_one_weight() -> None:
    """Each call had a weight of its own, in files and counts, and was pruned apart."""
    torch.manual_seed(0)
    whole = TorchCarrier(Looped(), INPUTS)
    names = ["stem.weight", "step.weight", "head.weight"]
    assert [layer.weight for layer in whole.layers()] == names
    after = pruned(declared(target={"ratio": 0.5}), whole, Given((images(),))).carrier
    assert isinstance(after, TorchCarrier)
    assert isinstance(after.module, Looped)
    assert [layer.weight for layer in after.layers()] == names
    assert after.module.step.weight.shape == (4, 4, 3, 3)
    assert worst(output(after), after.module_outputs(images())[0]) < 1e-5


def test_they_are_pruned_and_reload(tmp_path: Path) -> None:
    outcome = pruned(declared(target={"ratio": 0.5}), carrier(Standardized), Given((images(),)))
    small = outcome.carrier
    assert any("10 removed units were proved" in note for note in outcome.notes)
    assert isinstance(small, TorchCarrier)
    assert small.executes_graph  # its forward would compute other weights of fewer inputs
    trained = {n for n, p in small.module.named_parameters() if p.requires_grad}
    assert {f"{name}.computed.weight" for name in "ab"} < trained
    assert max(reload_errors(small, images(), tmp_path).values()) < 1e-6


def test_those_of_parametrizations_are_pruned_in_the_module(tmp_path: Path) -> None:
    whole = carrier(parametrized)
    step = declared(target={"ratio": 0.5})
    outcome = pruned(step, whole, Given((images(),)))
    small = outcome.carrier
    assert isinstance(small, TorchCarrier)
    assert type(small.module) is Net
    stored = {n: tuple(t.shape) for n, t in small.module.state_dict().items() if "original" in n}
    assert stored == {
        "a.parametrizations.weight.original0": (4, 1, 1, 1),
        "a.parametrizations.weight.original1": (4, 3, 3, 3),
        "b.parametrizations.weight.original0": (6, 1, 1, 1),
        "b.parametrizations.weight.original1": (6, 4, 3, 3),
    }
    assert small.module.b.in_channels == 4
    assert worst(output(small), small.module_outputs(images())[0]) < 1e-5
    preview = step.preview(whole, PassContext(), {})
    shapes = [{n: t.shape for n, t in c.tensors().items()} for c in (preview, small)]
    assert shapes[0] == shapes[1]
    assert [(x.name, x.shape) for x in preview.layers()] == [
        (x.name, x.shape) for x in small.layers()
    ]
    small.save(tmp_path)
    restored = whole.restore(tmp_path)
    assert isinstance(restored, TorchCarrier)
    assert np.array_equal(output(restored), output(small))
    longer = small.module.state_dict()["b.parametrizations.weight.original0"] * 2
    trained = small.with_weights({"b.parametrizations.weight.original0": longer})
    assert worst(output(trained), trained.module_outputs(images())[0]) < 1e-5
    assert worst(output(trained), output(small)) > 0.01


class Unit(nn.Module):
    """Divides a weight by its norm."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm()


class Refusing(Unit):
    def right_inverse(self, weight: Tensor) -> Tensor:
        raise NotImplementedError


def unit(read: int, written: int) -> nn.Module:
    return parametrize.register_parametrization(nn.Conv2d(read, written, 3), "weight", Unit())


def refusing(read: int, written: int) -> nn.Module:
    return parametrize.register_parametrization(nn.Conv2d(read, written, 3), "weight", Refusing())


def spectral_parametrized(read: int, written: int) -> nn.Module:
    return parametrizations.spectral_norm(nn.Conv2d(read, written, 3, padding=1))


@pytest.mark.parametrize("kind", [unit, refusing, spectral_parametrized])
def test_parametrizations_that_cannot_compute_a_smaller_weight_leave_the_graph(
    kind: Callable[[int, int], nn.Module],
) -> None:
    small = pruned(declared(target={"ratio": 0.5}), carrier(kind), Given((images(),))).carrier
    assert isinstance(small, TorchCarrier)
    assert small.executes_graph
    assert worst(output(small), small.module_outputs(images())[0]) < 1e-5


def test_the_module_is_trained_and_the_weights_follow() -> None:
    model = carrier(Standardized)
    gain = torch.full((8,), 2.0)
    trained = model.with_weights({"a.gain": gain})
    assert isinstance(trained, TorchCarrier)
    assert not trained.executes_graph
    assert worst(output(trained), trained.module_outputs(images())[0]) < 1e-5
    assert worst(output(trained), output(model)) > 0.01


def test_a_checkpoint_that_is_loaded_later(tmp_path: Path) -> None:
    """A plan may have computed weights of what the factory drew."""
    model = TorchCarrier(Net(Standardized), INPUTS)
    layer = next(layer for layer in model.layers() if layer.name == "a.computed")
    before = model.weight(layer).clone()
    save_file(carrier(Standardized).module.state_dict(), tmp_path / "w.safetensors")
    model.load(tmp_path / "w.safetensors")
    assert not torch.equal(model.weight(layer), before)
    assert torch.equal(model.weight(layer), carrier(Standardized).weight(layer))
    assert worst(output(model), output(carrier(Standardized))) < 1e-6


class Moved(nn.Module):
    """Parameters that hold several weights, or one in another order than layers read it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 8))
        self.pair = nn.Parameter(torch.randn(10, 8))
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.conv2d(image, self.kernel.permute(3, 2, 0, 1)).mean((2, 3))
        left, right = self.pair.chunk(2)
        x = self.inner(functional.linear(x, left) * functional.linear(x, right))
        logits: Tensor = self.head(torch.relu(x))
        return logits


def test_weights_that_are_moved_are_named_until_they_are_fused() -> None:
    """They stay the module's parameters, so that pruning keeps its class."""
    model = TorchCarrier(Moved(), INPUTS)
    notes = QuantizeWeights(bits=8).survey(model, PassContext()).notes
    note = "weights computed as the model runs stay floats: 1 Conv, 2 Gemm; put fuse before this"
    assert any(note in text for text in notes)
    fused = Fuse().apply(model, PassContext(), {}).carrier
    assert len(fused.layers()) == len(model.layers()) + 3
    assert computed_weights(fused) == ()
    small = pruned(declared(target={"ratio": 0.5}), model, Given((images(),))).carrier
    assert isinstance(small, TorchCarrier)
    assert not small.executes_graph
    assert small.module.kernel.shape == (3, 3, 3, 4)
