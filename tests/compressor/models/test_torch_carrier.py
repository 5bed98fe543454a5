"""The carrier of modules: building, loading, changing, storing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compressor.errors import ModelError, SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier, open_module
from compressor.models.torch.matching import check_checkpoint
from compressor.types.carrier import Capability
from tests.compressor.models.sample_modules import batch_of, lowered, spec

LENGTHS = {"n": 3, "batch": 2, "time": 5}
X = [spec("x", "n", 3)]


def linear(width: int = 2) -> nn.Module:
    return nn.Linear(3, width)


def test_a_factory_gets_the_config_and_its_module_is_evaluated():
    carrier = open_module(linear, {"width": 5}, X, "model.factory")
    assert carrier.module.weight.shape == (5, 3)
    assert not carrier.module.training
    assert carrier.kind == "torch"
    assert carrier.offers == set(Capability)
    assert carrier.inputs == tuple(X)


def raising() -> nn.Module:
    raise KeyError("depth")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (raising, "key: the factory raised KeyError: 'depth'; call it in a Python shell"),
        (lambda: None, "key: the factory returned a NoneType; return a torch.nn.Module"),
        (lambda: nn.Linear, "key: the factory returned a type; return a torch.nn.Module"),
        (lambda need: need, "key: the factory raised TypeError: "),
    ],
)
def test_factories_that_go_wrong(factory: Callable[..., object], message: str):
    with pytest.raises(SpecError) as caught:
        open_module(factory, {}, X, "key")
    assert str(caught.value).startswith(message)


def test_a_module_needs_its_inputs_declared():
    with pytest.raises(SpecError, match=r"model.inputs: is empty.*write e\.g\. inputs: \{image"):
        open_module(linear, {}, [], "key")


def test_loading_reaches_the_graph_that_is_there_already(tmp_path: Path):
    carrier = open_module(linear, {}, X, "key")
    batch = batch_of(carrier, LENGTHS)
    before = carrier.runner().run(batch)["output"]
    weight, bias = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, -1])
    torch.save({"state_dict": {"weight": weight, "bias": bias}}, tmp_path / "w.pt")
    carrier.load(tmp_path / "w.pt")
    after = carrier.runner().run(batch)["output"]
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, batch["x"] @ weight.numpy().T + bias.numpy(), rtol=1e-5)
    (layer,) = carrier.layers()
    assert torch.equal(carrier.weight(layer), weight)


class _SameNames(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.x = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("scale", torch.rand(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x * self.x)
        return {"scores": scores, "scale": scores * self.scale}


def test_tensors_give_way_to_inputs_and_outputs_of_their_names(tmp_path: Path):
    carrier = open_module(_SameNames, {}, X, "key")
    batch = batch_of(carrier, LENGTHS)
    assert [o.name for o in carrier.outputs] == ["scores", "scale"]
    state = {k: v + 1 for k, v in _SameNames().state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    carrier.load(tmp_path / "w.pt")
    changed = carrier.with_weights({"x": state["x"] + 2, "scale": state["scale"] * 3})
    changed.save(tmp_path)
    restored = carrier.restore(tmp_path)
    for each, factor in ((carrier, 1), (changed, 3), (restored, 3)):
        results = each.runner().run(batch)
        assert isinstance(each, TorchCarrier)
        for have, want in zip(results.values(), each.module_outputs(batch), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
        expected = results["scores"] * state["scale"].numpy() * factor
        np.testing.assert_allclose(results["scale"], expected, rtol=1e-5, atol=1e-5)
    executing = carrier.with_trainable_graph(carrier.graph(), ())
    assert isinstance(executing, TorchCarrier)
    assert executing.executes_graph
    names = {name for name, _ in executing.module.named_parameters()}
    assert names == {"x.tensor", "linear.weight", "linear.bias"}, "trained as before"


def test_half_precision_checkpoints_fit(tmp_path: Path):
    carrier = open_module(linear, {}, X, "key")
    halves = {n: t.half() for n, t in linear().state_dict().items()}
    save_file(halves, tmp_path / "w.safetensors")
    check_checkpoint(carrier.module, tmp_path / "w.safetensors")
    carrier.load(tmp_path / "w.safetensors")
    assert torch.equal(carrier.module.weight, halves["weight"].float())


def test_checking_a_checkpoint_changes_nothing(tmp_path: Path):
    carrier = open_module(linear, {}, X, "key")
    before = carrier.module.weight.clone()
    torch.save(linear().state_dict(), tmp_path / "w.pt")
    check_checkpoint(carrier.module, tmp_path / "w.pt")
    assert torch.equal(carrier.module.weight, before)
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(ModelError, match=r"empty\.safetensors': holds no tensors; save it again"):
        check_checkpoint(carrier.module, tmp_path / "empty.safetensors")


def test_new_weights_give_a_new_carrier():
    carrier = lowered("pair")
    batch = batch_of(carrier, LENGTHS)
    before = carrier.runner().run(batch)
    layer = carrier.layers()[0]
    old = carrier.weight(layer).clone()
    changed = carrier.with_weights({layer.weight: old * 3})
    assert torch.equal(changed.weight(layer), old * 3)
    assert torch.equal(carrier.weight(layer), old)
    for have, want in zip(
        changed.runner().run(batch).values(), changed.module_outputs(batch), strict=True
    ):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    for name, array in carrier.runner().run(batch).items():
        np.testing.assert_array_equal(array, before[name])
    assert changed.layers() == carrier.layers()


def test_tied_weights_stay_tied():
    carrier = lowered("block")
    table = carrier.layers()[0]
    changed = carrier.with_weights({table.weight: carrier.weight(table) * 2})
    assert torch.equal(changed.module.head.weight, changed.module.embed.weight)
    batch = batch_of(carrier, LENGTHS)
    (have,) = changed.runner().run(batch).values()
    (want,) = changed.module_outputs(batch)
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def test_an_unknown_weight_is_refused():
    with pytest.raises(KeyError, match=r"no parameter 'c\.weight'"):
        lowered("pair").with_weights({"c.weight": torch.zeros(1)})


class Positions(nn.Module):
    """Looks up a table that its checkpoints do not hold, as the sinusoids of M2M-100."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(7, 4), persistent=False)
        self.fc = nn.Linear(4, 2)

    def forward(self, ids):
        return self.fc(nn.functional.embedding(ids, self.table))


def test_the_weight_of_a_layer_may_be_a_buffer_that_is_not_stored():
    carrier = TorchCarrier(Positions(), (spec("ids", "n", "time", dtype="int64"),))
    table, fc = carrier.layers()
    assert (table.weight, fc.weight) == ("table", "fc.weight")
    torch.testing.assert_close(carrier.weight(table), carrier.module.table)


class Turned(nn.Module):
    """Multiplies by a matrix that is in no checkpoint: a buffer, or an attribute like others."""

    def __init__(self, *, buffer: bool):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.turn = nn.Buffer(torch.randn(4, 4), persistent=False) if buffer else torch.randn(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x)) @ self.turn


@pytest.mark.parametrize("buffer", [True, False])
def test_a_weight_that_the_module_does_not_store_can_be_replaced(buffer: bool):
    carrier = TorchCarrier(Turned(buffer=buffer), (spec("x", "batch", 4),))
    layer = next(x for x in carrier.layers() if x.weight == "turn")
    matrix = carrier.weight(layer)
    torch.testing.assert_close(matrix, carrier.module.turn)
    after = carrier.with_weights({"turn": 2 * matrix})
    assert "turn" in after.tensors()
    batch = batch_of(carrier, LENGTHS)
    (before,), (found,) = (c.runner().run(batch).values() for c in (carrier, after))
    np.testing.assert_allclose(found, 2 * before, rtol=1e-6)


def test_taps_yield_values_inside_the_graph():
    carrier = lowered("pair")
    batch = batch_of(carrier, LENGTHS)
    first = carrier.layers()[0]
    found = carrier.runner([first.output]).run(batch)
    assert len(found) == len(carrier.outputs) + 1
    module = carrier.module
    with torch.inference_mode():
        wanted = module.a(torch.from_numpy(batch["left"])).numpy()
    np.testing.assert_allclose(found[first.output], wanted, rtol=1e-5, atol=1e-6)
    assert len(carrier.graph().graph.outputs) == len(carrier.outputs)


def test_what_is_saved_comes_back(tmp_path: Path):
    carrier = lowered("block")
    batch = batch_of(carrier, LENGTHS)
    changed = carrier.with_weights({"qkv.weight": carrier.module.qkv.weight.detach() * 2})
    changed.save(tmp_path)
    restored = carrier.restore(tmp_path)
    assert isinstance(restored, TorchCarrier)
    assert torch.equal(restored.module.qkv.weight, changed.module.qkv.weight)
    for have, want in zip(
        restored.runner().run(batch).values(), changed.runner().run(batch).values(), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def test_a_changed_graph_comes_back_without_the_module(tmp_path: Path):
    carrier = lowered("pair")
    after = carrier.with_graph(carrier.graph().clone())
    assert isinstance(after, OnnxCarrier)
    assert Capability.TRAIN not in after.offers
    after.save(tmp_path)
    restored = carrier.restore(tmp_path)
    assert isinstance(restored, OnnxCarrier)
    batch = batch_of(carrier, LENGTHS)
    for name, array in after.runner().run(batch).items():
        np.testing.assert_array_equal(restored.runner().run(batch)[name], array)
