"""Models that others quantized are made floats of, and quantized again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from compressor import catalog
from compressor.calibration.collect import collect_statistics
from compressor.errors import SpecError
from compressor.passes.factor.low_rank import LowRank
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from compressor.types.tensors import Array
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import IMAGES, run, sqnr
from tests.compressor.passes.quantize.test_dequantize import CONTEXT, opened


@pytest.mark.parametrize("how", ["QDQ-QUInt8", "QOperator-QUInt8"])
@pytest.mark.parametrize(
    "declared",
    [
        QuantizeStatic(),
        QuantizeDynamic(convolutions=True),
        QuantizeWeights(bits=8),
        PruneStructured.model_validate({"target": {"ratio": 0.5}}),
        LowRank(rank=2),
    ],
    ids=lambda declared: declared.name,
)
def test_quantizing_again_names_the_way(tmp_path: Path, declared: Any, how: str) -> None:
    guest = guests.by_runtime(guests.convolutional(), how, IMAGES, tmp_path)
    message = r"touches no layer: .*put \{pass: cast, dtype: fp32\} .* before it"
    with pytest.raises(SpecError, match=message):
        declared.survey(opened(guest, tmp_path), CONTEXT)


def applied(carrier: Carrier, declared: Any, context: PassContext, x: Array) -> Carrier:
    requests = declared.survey(carrier, context).requests
    statistics = collect_statistics(carrier, [{"x": x}], requests)
    after: Carrier = declared.apply(carrier, context, statistics).carrier
    return after


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "ort-cpu"])
@pytest.mark.parametrize("how", ["QDQ-QUInt8", "QOperator-QUInt8"])
def test_quantized_again_for_another_target(tmp_path: Path, how: str, target: str) -> None:
    """With the codes that the weights had."""
    model = guests.convolutional()
    guest = guests.by_runtime(model, how, IMAGES, tmp_path)
    carrier, context = opened(guest, tmp_path), PassContext(targets=frozenset({target}))
    again = QuantizeStatic.model_validate({"weights": {"overflow": "allow"}}, strict=False)
    for declared in (Cast(dtype="fp32"), Fuse(), again):
        carrier = applied(carrier, declared, context, IMAGES)
    exporter = catalog.load("exporter", "onnx")(target=target)
    exporter.check(carrier)
    (tmp_path / "out").mkdir()
    path = exporter.write(carrier, tmp_path / "out", ExportContext("guest", "0" * 64))[0]
    before = {t.name: numpy_helper.to_array(t) for t in onnx.load(guest).graph.initializer}
    after = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for name in ("one", "two", "fc"):
        codes = before[f"{name}.weight_quantized"]
        kept = after[f"{name}.weight"]
        assert np.mean(kept == (codes if codes.shape == kept.shape else codes.T)) > 0.99
    reference = run(model, IMAGES)
    assert sqnr(reference, run(path, IMAGES)) > min(sqnr(reference, run(guest, IMAGES)) - 3, 35)


@pytest.mark.parametrize("how", ["QDQ-QUInt8", "QOperator-QUInt8"])
def test_an_export_that_does_not_take_it_names_the_way(tmp_path: Path, how: str) -> None:
    carrier = opened(guests.by_runtime(guests.convolutional(), how, IMAGES, tmp_path), tmp_path)
    exporter = catalog.load("exporter", "onnx")(target="tensorrt")
    with pytest.raises(SpecError, match=r"\{pass: cast, dtype: fp32\}"):
        exporter.check(carrier)
