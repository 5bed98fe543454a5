"""What a rule for one layer costs: the bytes that the exporter writes more."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor import catalog
from compressor.graph.costs import layer_bytes
from compressor.lab.explain import by_sqnr
from compressor.lab.explain.by_sqnr import FinishedRun
from compressor.lab.explain.explanation import Change
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.layers import Scheme, WeightCodes
from tests.compressor.graph.random_codes import random_codes
from tests.compressor.passes.quantize.small_models import graph, noise

WIDTH = 256
OPERATORS = 2100  # bytes of a graph around codes and of a table of codes, at most


def network(bits: int | None) -> OnnxCarrier:
    """Return one product, whose weight is stored in so many bits."""
    text = f"g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{ y = MatMul(x, fc.weight) }}"
    carrier = graph(text, {"fc.weight": noise(WIDTH, WIDTH)})
    if bits is None:
        return carrier
    (layer,) = carrier.layers()
    scheme = Scheme(bits=bits)
    codes = random_codes(layer, scheme)
    return carrier.with_codes({layer.weight: WeightCodes(layer, scheme, lambda _: codes)})


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("name", ["onnx", "safetensors", "openvino"])
def test_eight_bits_cost_what_the_exporter_writes(name: str, bits: int):
    """Three bits counted as three, which an ONNX file stores in four; six as six of its eight."""
    exporter = catalog.load("exporter", name)()
    narrow, wide = network(bits), network(8)
    (skipped,) = layer_bytes(network(None)).values()
    (held,) = layer_bytes(narrow).values()
    report = {"artifacts": [{"format": name, "deployed": True}]}
    spec = {"model": {"onnx": "m.onnx"}, "exports": [{"format": name}]}
    run = FinishedRun(Path(), report, {"spec": spec}, None)
    declared = catalog.load("pass", "quantize-weights")(bits=bits)
    change = Change(0, "fc", {"bits": 8})
    cost = by_sqnr._cost(run, declared, change, f"int{bits}/channel") * (skipped - held)
    more = exporter.predict(wide) - exporter.predict(narrow)
    assert cost == pytest.approx(more, abs=OPERATORS)
    skip = by_sqnr._cost(run, declared, Change(0, "fc", {"skip": True}), f"int{bits}/channel")
    more = exporter.predict(network(None)) - exporter.predict(narrow)
    assert skip * (skipped - held) == pytest.approx(more, abs=OPERATORS)
