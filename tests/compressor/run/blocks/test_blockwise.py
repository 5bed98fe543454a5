"""Calibration block by block: the same statistics as in one pass, of the model as it is by then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.calibration.collect import collect
from compressor.errors import DataError
from compressor.graph.blocks import partition
from compressor.graph.layers import graph_layers
from compressor.models.torch.carrier import TorchCarrier
from compressor.run.blocks.blockwise import Activations, Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes
from compressor.types.statistics import Moments, Request
from compressor.types.tensors import Array, Batch, TensorSpec

SPEC = TensorSpec("x", ("batch", 6), "float32")


class Residual(nn.Module):
    """Three residual blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.up = nn.ModuleList(nn.Linear(6, 10) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(10, 6, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.fixture(scope="module")
def model() -> Carrier:
    torch.manual_seed(0)
    return TorchCarrier(Residual(), [SPEC])


def batches(count: int = 3) -> list[Batch]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((4, 6), np.float32)} for _ in range(count)]


def requests(model: Carrier) -> tuple[Request, ...]:
    found = {layer.inputs[0]: Request(layer.inputs[0], "second-moment") for layer in model.layers()}
    return tuple(found.values())


def whole(model: Carrier, given: list[Batch]) -> dict[str, Any]:
    asked = requests(model)
    runner = model.runner([r.tensor for r in asked if r.tensor != "x"])
    return collect(lambda b: {**b, **runner.run(b)}, given, asked)


def blocks_of(model: Carrier, folder: Path, given: list[Batch], **feed: Any) -> GraphBlocks:
    graph = model.graph()
    return GraphBlocks(graph, partition(graph), requests(model), Feed(given, folder, **feed))


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, moments in found.items():
        assert isinstance(moments, Moments)
        np.testing.assert_allclose(moments.second, wanted[key].second, rtol=1e-4, atol=1e-4)
        assert moments.rows == wanted[key].rows


def test_float_blocks_give_the_statistics_of_the_whole_model(model, tmp_path):
    found: dict[str, Any] = {}
    names = []
    run = blocks_of(model, tmp_path, batches())
    for block in run:
        found.update(block.statistics)
        names += [n for n in block.weights if n.endswith(".weight")]
    assert len(run) == 4
    assert found.keys() == {r.key for r in requests(model)}
    assert names == [layer.weight for layer in graph_layers(model.graph())]
    same(found, whole(model, batches()))


def test_what_is_replaced_flows_into_the_blocks_that_follow(model, tmp_path):
    layer = next(x for x in model.layers() if x.name == "down.0")
    scheme = Scheme(4)

    def compute(matrix: torch.Tensor) -> QuantizedTensor:
        scale = matrix.abs().amax(1, keepdim=True) / 7
        return QuantizedTensor(
            (matrix / scale).round().to(torch.int8), scale, torch.zeros_like(scale), scheme
        )

    bias = torch.full((10,), 0.5)
    found: dict[str, Any] = {}
    for block in blocks_of(model, tmp_path, batches()):
        found.update(block.statistics)
        if "down.0.weight" in block.weights:
            block.replace({"down.0.weight": WeightCodes(layer, scheme, compute)})
        if "up.1.bias" in block.weights:
            block.replace({"up.1.bias": bias})
    rounded = layer.stored(compute(layer.canonical(model.weight(layer))).dequantize())
    after = model.with_weights({"down.0.weight": rounded})
    later = model.with_weights({"down.0.weight": rounded, "up.1.bias": bias})
    keys = {x.name: f"{x.inputs[0]}|second-moment()" for x in model.layers()}
    before = {keys[n]: found[keys[n]] for n in ("stem", "up.0", "down.0")}
    same(before, whole(model, batches()))
    same({keys[n]: found[keys[n]] for n in ("up.1", "down.1")}, whole(after, batches()))
    same({keys[n]: found[keys[n]] for n in ("up.2", "down.2")}, whole(later, batches()))
    changed = whole(model, batches())[keys["up.1"]].second - found[keys["up.1"]].second
    assert changed.abs().max() > 0.01


def test_progress_counts_samples_of_every_block(model, tmp_path):
    seen: list[int] = []
    for _ in blocks_of(model, tmp_path, batches(), advance=seen.append):
        pass
    assert seen == sorted(seen)
    assert seen[-1] == 4 * 12


def test_the_states_of_all_processes_are_merged(model, tmp_path):
    class Half:
        """One of two processes that run one after another, block by block."""

        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def wait(self) -> None:
            pass

        def gathered(self, value: Any) -> list[Any]:
            return [value, value]

    for rank in (0, 1):
        own = batches(5)[rank::2]
        folder = tmp_path / str(rank)
        folder.mkdir()
        found: dict[str, Any] = {}
        for block in blocks_of(model, folder, own, ranks=Half(rank)):
            found.update(block.statistics)
        for key, moments in whole(model, [*own, *own]).items():
            np.testing.assert_allclose(found[key].second, moments.second, rtol=1e-4, atol=1e-4)
            assert found[key].rows == moments.rows


def test_no_batches_are_an_error(model, tmp_path):
    with pytest.raises(DataError, match="has no samples"):
        next(iter(blocks_of(model, tmp_path, [])))


def test_activations_beyond_the_limit_lie_in_files_that_go_with_them(tmp_path):
    def array(value: int) -> Array:
        return np.full((4, 8), value, np.float32)

    store = Activations(tmp_path, limit=3 * 128)
    for value in range(5):
        store.append("a", array(value))
        store.append("b", array(10 + value))
    assert len(list(tmp_path.iterdir())) == 7
    found = list(store.batches(["b", "a"]))
    assert [int(b["a"][0, 0]) for b in found] == [0, 1, 2, 3, 4]
    assert [int(b["b"][0, 0]) for b in found] == [10, 11, 12, 13, 14]
    store.keep(["b"])
    assert len(list(tmp_path.iterdir())) == 4
    store.append("c", array(1))
    assert len(list(tmp_path.iterdir())) == 4, "what was freed is used again"
    store.keep([])
    assert not list(tmp_path.iterdir())
