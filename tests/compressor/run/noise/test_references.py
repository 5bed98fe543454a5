"""What layers whose channels were scaled are compared with, in whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.calibration.collect import collect_statistics
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.tensors import Batch
from tests.compressor.passes.prepare.networks import stretched
from tests.compressor.passes.quantize.static_models import ORT, Given
from tests.compressor.tiny_project import ONNX, Project, sample_images

EVERY = [{"match": "*"}]
STATIC: dict[str, Any] = {
    "pass": "quantize-static",
    "layers": EVERY,
    "activations": {"observer": "mse"},  # noises of two runs are compared
}
CUT: dict[str, Any] = {
    "pass": "prune-magnitude",
    "sparsity": 0.4,
    "layers": [{"match": "fc"}, {"match": "*", "skip": True}],
}


@pytest.fixture
def uneven(on_onnx: Project) -> Project:
    """A project whose network has channels of sizes that differ by up to 256 times."""
    path = on_onnx.folder / ONNX
    ir.save(stretched(open_onnx(path, 21), 16.0).graph(), path)
    return on_onnx


def entry(project: Project, place: int = -1) -> dict[str, Any]:
    result = project.run()
    assert result.exit_code == 0, result.report
    found: dict[str, Any] = result.report["passes"][place]
    return found


def signals(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["sqnr_db"] for row in found["layers"]}


def float_model(project: Project) -> OnnxCarrier:
    return open_onnx(project.folder / ONNX, 21)


def scaled_alike(project: Project) -> Carrier:
    """Return the float model with its channels scaled as the pass scales them."""
    carrier = float_model(project)
    calibration = [{"image": part} for part in np.split(sample_images(2), 3)]
    declared = QuantizeStatic.model_validate({"layers": EVERY}, strict=False)
    context = replace(ORT, samples=Given(calibration))
    requests = declared.survey(carrier, context).requests
    statistics = collect_statistics(carrier, calibration, requests)
    rescale = declared.apply(carrier, context, statistics).rescale
    assert rescale is not None
    return rescale(carrier)


def by_hand(exact: Carrier, compressed: Carrier, batch: Batch) -> dict[str, float]:
    """Return the signal to noise of what each layer writes, in dB."""
    outputs = {layer.name: layer.output for layer in exact.layers()}
    want, have = (c.runner(list(outputs.values())).run(batch) for c in (exact, compressed))
    return {
        name: 10 * np.log10(np.square(want[o]).sum() / np.square(want[o] - have[o]).sum())
        for name, o in outputs.items()
    }


def test_scaled_layers_are_compared_with_float_layers_scaled_alike(uneven: Project):
    uneven.spec["passes"] = [STATIC]
    found = signals(entry(uneven))
    exact, given = scaled_alike(uneven), float_model(uneven)
    batch = {"image": sample_images(1)}
    wanted = given.runner(["a", "c"]).run(batch)
    scaled = exact.runner(["a", "c"]).run(batch)
    np.testing.assert_allclose(scaled["logits"], wanted["logits"], rtol=0, atol=1e-5)
    for name in ("a", "c"):
        factors = scaled[name].max((0, 2, 3)) / wanted[name].max((0, 2, 3))
        assert factors.max() / factors.min() > 4
        np.testing.assert_allclose(
            scaled[name], wanted[name] * factors[:, None, None], rtol=1e-3, atol=1e-4
        )
    after = open_onnx(uneven.output / "model.onnx", 21)
    assert found == pytest.approx(by_hand(exact, after, batch), abs=0.1)
    assert min(found.values()) > 20


def test_a_run_that_is_resumed_says_the_same(uneven: Project):
    uneven.spec["passes"] = [STATIC, {"pass": "cast", "dtype": "fp32"}]
    first = uneven.run().report["passes"]
    again = uneven.run().report["passes"]
    assert [found["cached"] for found in again] == [True, True]
    assert [found["layers"] for found in again] == [found["layers"] for found in first]
    assert all(signals(first[1])[name] >= db for name, db in signals(first[0]).items())


@pytest.mark.parametrize(
    "scales", [pytest.param("equalize", marks=pytest.mark.slow), "quantize-static"]
)
def test_noise_that_was_there_before_is_not_the_later_pass_s(uneven: Project, scales: str):
    """Pruned weights are compared with the float model's, and what pruning did is pruning's."""
    later = (
        [STATIC]
        if scales == "quantize-static"
        else [{"pass": "equalize"}, {**STATIC, "prepare": "none"}]
    )
    uneven.spec["passes"] = later
    alone = entry(uneven)
    uneven.spec["passes"] = [CUT, *later]
    cut, *_, found = uneven.run().report["passes"]
    assert signals(found)["fc"] == pytest.approx(signals(cut)["fc"], abs=0.5)
    assert signals(cut)["fc"] < 20 < 30 < min(signals(alone).values())
    noises, expected = (
        {row["name"]: row["output_sqnr_db"] for row in e["attribution"]["layers"]}
        for e in (found, alone)
    )
    for name in ("conv1", "conv2"):
        assert noises[name] == pytest.approx(expected[name], abs=2)


def test_a_model_with_fewer_channels_is_scaled_itself(uneven: Project):
    uneven.spec["passes"] = [{"pass": "prune-structured", "target": {"ratio": 0.5}}, STATIC]
    found = signals(uneven.run().report["passes"][1])
    assert min(found.values()) > 20


def test_histograms_count_weights_and_inputs_of_one_scale(uneven: Project):
    uneven.spec["passes"] = [STATIC]
    found = {row["name"]: row for row in entry(uneven)["histograms"]}
    assert found.keys() == {"conv1", "conv2", "fc"}
    for name, row in found.items():
        weight, given = row["weight"], row["input"]
        assert [weight["low"], weight["high"]] == pytest.approx(weight["range"], rel=0.02), name
        assert given["outside"] < 1, name
        low, high = given["range"]
        assert low <= given["low"] + 0.1 * high
        assert given["high"] > 0.3 * high, name
