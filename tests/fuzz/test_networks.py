"""Random networks keep their function where channels are scaled, graphs fused, weights stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compressor.errors import SpecError
from compressor.exporters import LitertExporter
from compressor.models.onnx.carrier import open_onnx
from compressor.models.torch.lowering import OPSET
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.prepare.balance import Balance, ScaledGroup, scaled_weights
from compressor.passes.prepare.groups import scale_map
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.scales import ScaleMap
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.types.carrier import Carrier
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch
from tests.fuzz.networks import Network
from tests.fuzz.pieces import PIECES

ORT = PassContext(0, frozenset({"ort-cpu"}))
LITERT, LITERT_ONLY = LitertExporter(), PassContext(0, frozenset({"litert"}))
_NEAR = 1e-4  # of the largest output
_FEW, _MANY = range(1000, 1010), range(100)


def distance(wanted: Batch, found: Batch) -> float:
    """Return the largest difference, over the largest element of each output."""
    assert list(wanted) == list(found)
    pairs = [(wanted[name], found[name]) for name in wanted if wanted[name].size]
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)) for a, b in pairs)


def check_scales(carrier: Carrier, scales: ScaleMap, batch: Batch, seed: int) -> None:
    """Scale all groups at once: outputs stay, and what changes inside is named by a group."""
    random = torch.Generator().manual_seed(seed)
    groups = tuple(
        ScaledGroup(group, 8 ** (2 * torch.rand(group.count, generator=random) - 1), 0.0)
        for group in scales.groups
    )
    after = Balance(scaled_weights(carrier, groups), groups, {}).applied(carrier)
    computed = {value.name or "" for value in carrier.graph().graph.inputs}
    for node in carrier.graph().graph:
        if any(value is not None and value.name in computed for value in node.inputs):
            computed.update(value.name or "" for value in node.outputs)
    floats = [v for v in computed - batch.keys() if v]
    old, new = (c.runner(floats).run(batch) for c in (carrier, after))
    ends = [spec.name for spec in carrier.outputs]
    assert distance({v: old[v] for v in ends}, {v: new[v] for v in ends}) < _NEAR
    named = {v for s in groups for v in (*s.group.values, *s.group.others)}
    for value in {v for v in floats if old[v].size and old[v].dtype == np.float32} - named:
        assert distance({value: old[value]}, {value: new[value]}) < 10 * _NEAR, value


def check(seed: int, folder: Path) -> None:
    """Make a network, and all that is to leave its function as it is."""
    network = Network(seed, 6 + seed % 19, PIECES)
    onnx.save(network.model(), folder / "network.onnx")
    given, batch = open_onnx(folder / "network.onnx", OPSET), network.batch(99)
    fused = Fuse().apply(given, ORT, {}).carrier
    assert distance(given.runner().run(batch), fused.runner().run(batch)) < _NEAR
    layers = [layer.name for layer in fused.layers() if layer.is_linear]
    parameters = fused.tensors().keys()
    for start in (ScaleMap((), (), {}, ""), scale_map(fused.graph(), parameters)):
        products = with_product_groups(start, fused.graph(), layers, parameters)
        check_scales(fused, products if not start.groups else start, batch, seed)
    try:
        dynamic = QuantizeDynamic().apply(fused, ORT, {}).carrier
    except SpecError:
        return  # it has no layer for that
    assert dynamic.runner().run(batch).keys() == fused.runner().run(batch).keys()


def check_device(seed: int, folder: Path) -> None:
    """Write a network and its halves for LiteRT, unless it has no operator for something."""
    network = Network(seed, 6 + seed % 19, PIECES)
    onnx.save(network.model(), folder / "network.onnx")
    given, batch, exporter = open_onnx(folder / "network.onnx", OPSET), network.batch(99), LITERT
    fused = Fuse().apply(given, ORT, {}).carrier
    wanted = fused.runner().run(batch)
    for name, carrier, near in (("floats", fused, 1e-3), ("halves", _halves(fused), 0.05)):
        (folder / name).mkdir()
        try:
            exporter.check(carrier)
        except SpecError:
            continue
        path = exporter.write(carrier, folder / name, USUAL)[0]
        found = exporter.open(path).run(batch)
        assert distance(wanted, {output: found[output] for output in wanted}) < near, name


def _halves(carrier: Carrier) -> Carrier:
    try:
        return Cast().apply(carrier, LITERT_ONLY, {}).carrier
    except SpecError:
        return carrier  # it has no layer


@pytest.mark.parametrize("seed", _FEW)
def test_random_networks_are_the_same_on_devices(seed: int, tmp_path: Path):
    check_device(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", _MANY)
def test_many_random_networks_are_the_same_on_devices(seed: int, tmp_path: Path):
    check_device(seed, tmp_path)


@pytest.mark.parametrize("seed", _FEW)
def test_random_networks_keep_their_function(seed: int, tmp_path: Path):
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", _MANY)
def test_many_random_networks_keep_their_function(seed: int, tmp_path: Path):
    check(seed, tmp_path)
