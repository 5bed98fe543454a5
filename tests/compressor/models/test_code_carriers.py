"""Weights that are stored as codes, on the carriers that have a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.graph import editing
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import TensorSpec

BATCH = {"x": np.linspace(-1, 1, 3 * 8, dtype=np.float32).reshape(3, 8)}
SCHEME = Scheme(8, granularity="channel")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 6)
        self.second = torch.nn.Linear(6, 4)
        self.again = torch.nn.Linear(6, 4)
        self.again.weight = self.second.weight  # shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.second(y) + self.again(y)


@cache
def torch_net() -> TorchCarrier:
    return TorchCarrier(Net(), [TensorSpec("x", ("batch", 8), "float32")])


def rounded(calls: list[str], layer: Layer, matrix: torch.Tensor) -> QuantizedTensor:
    """Round each row to 127 levels."""
    calls.append(layer.name)
    scale = matrix.abs().amax(1, keepdim=True) / 127
    codes = (matrix / scale).round().to(torch.int8)
    return QuantizedTensor(codes, scale, torch.zeros_like(scale, dtype=torch.int8), SCHEME)


def coded(carrier: Carrier, name: str, calls: list[str]) -> Carrier:
    layer = next(x for x in carrier.layers() if x.name == name)
    return carrier.with_codes(
        {layer.weight: WeightCodes(layer, SCHEME, partial(rounded, calls, layer))}
    )


def onnx_net() -> OnnxCarrier:
    return OnnxCarrier(torch_net().graph())


def test_a_graph_is_looked_through_once_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = onnx_net()
    walks: list[str] = []
    walk = editing.all_nodes

    def counted(graph: ir.Graph) -> Iterator[ir.Node]:
        walks.append("")
        return walk(graph)

    monkeypatch.setattr(editing, "all_nodes", counted)
    changes = {
        layer.weight: WeightCodes(layer, SCHEME, partial(rounded, [], layer))
        for layer in carrier.layers()
    }
    both = carrier.with_codes(changes)
    assert len(changes) == 2
    assert len(walks) == 1
    assert {layer.weight for layer in both.layers()} == changes.keys()


@pytest.fixture(params=[torch_net, onnx_net], ids=["torch", "onnx"])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    make: Callable[[], Carrier] = request.param
    return make()


def test_codes_are_found_when_they_are_read(carrier: Carrier):
    calls: list[str] = []
    after = coded(carrier, "first", calls)
    after.layers(), after.tensors(), after.graph()
    assert not calls
    assert after.weight(next(x for x in after.layers() if x.name == "first")).dtype == torch.int8
    assert calls == ["first"]


def test_the_model_runs_on_codes(carrier: Carrier):
    after = coded(carrier, "first", [])
    layer = carrier.layers()[0]
    exact = rounded([], layer, layer.canonical(carrier.weight(layer))).dequantize()
    by_hand = carrier.with_weights({"first.weight": layer.stored(exact)})
    ours, theirs = (next(iter(c.runner().run(BATCH).values())) for c in (after, by_hand))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    plain = next(iter(carrier.runner().run(BATCH).values()))
    assert np.abs(ours - plain).max() > 1e-4  # the carrier that it came from is as it was


def test_codes_survive_the_store(carrier: Carrier, tmp_path: Path):
    calls: list[str] = []
    after = coded(carrier, "first", calls)
    after.save(tmp_path)
    restored = carrier.restore(tmp_path)
    calls.clear()
    ours = next(iter(restored.runner().run(BATCH).values()))
    assert not calls  # nothing is found again
    np.testing.assert_array_equal(ours, next(iter(after.runner().run(BATCH).values())))
    assert Capability.TRAIN not in restored.offers


def test_tensors_name_shared_weights_once():
    tensors = torch_net().tensors()
    assert sorted(tensors) == [
        "again.bias",
        "first.bias",
        "first.weight",
        "second.bias",
        "second.weight",
    ]
    assert tensors["first.weight"].nbytes == 6 * 8 * 4
    after = coded(torch_net(), "first", []).tensors()["first.weight"]
    assert after.codes is not None
    assert after.nbytes == 6 * 8 + 6 * 4  # codes and one scale a row
    assert after.read().dtype == torch.float32


def test_only_what_changes_is_copied():
    before = torch_net()
    after = before.with_weights({"first.weight": torch.zeros(6, 8)})
    assert after.module.second.weight is before.module.second.weight
    assert after.module.first.weight is not before.module.first.weight
    assert bool(before.module.first.weight.any())
    shared = before.with_weights({"second.weight": torch.ones(4, 6)})
    assert shared.module.again.weight is shared.module.second.weight
    assert not bool((before.module.again.weight == 1).any())


def test_only_what_changes_is_stored(tmp_path: Path):
    before = torch_net()
    after = before.with_weights({"first.weight": torch.zeros(6, 8)})
    after.save(tmp_path)
    assert (tmp_path / "weights.safetensors").stat().st_size < 6 * 8 * 4 + 200
    restored = before.restore(tmp_path)
    assert isinstance(restored, TorchCarrier)
    assert not bool(restored.module.first.weight.any())
    assert restored.module.second.weight is before.module.second.weight


def test_codes_are_not_overwritten_by_floats():
    after = coded(torch_net(), "first", [])
    with pytest.raises(KeyError, match=r"first\.weight.*codes"):
        after.with_weights({"first.weight": torch.zeros(6, 8)})


def test_unknown_names():
    carrier = torch_net()
    layer = carrier.layers()[0]
    codes = WeightCodes(layer, SCHEME, partial(rounded, [], layer))
    with pytest.raises(KeyError, match="third"):
        carrier.with_codes({"third.weight": codes})


def test_another_dtype_leaves_the_source_as_it_was():
    before = onnx_net()
    after = before.with_weights({"first.weight": torch.zeros(6, 8, dtype=torch.float16)})
    assert before.layers()[0].dtype == "float32"
    assert after.layers()[0].dtype == "float16"
