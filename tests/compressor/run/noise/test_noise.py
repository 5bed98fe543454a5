"""Noise of single layers: of a pass that changes them, and of rounding alone."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest

from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.run.noise import noise
from compressor.run.noise.noise import measured_noise
from compressor.types.tensors import Batch
from tests.compressor.tiny_project import sample_images, tiny_onnx


class Counted:
    """A runner that counts its runs."""

    runtime = "counted"

    def __init__(self, runner: object, runs: list[int]):
        self._runner, self._runs = runner, runs

    def run(self, batch: Batch) -> Batch:
        self._runs[0] += 1
        return self._runner.run(batch)  # type: ignore[attr-defined,no-any-return]  # a Runner


@pytest.mark.parametrize(("change", "reaches"), [(1e-3, True), (1e-6, False)])
def test_the_rounding_of_fused_layers_is_not_followed_to_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: float, reaches: bool
):
    onnx.save(tiny_onnx(), tmp_path / "model.onnx")
    carrier = open_onnx(tmp_path / "model.onnx", 21)
    layers = carrier.layers()
    changed: OnnxCarrier = carrier.with_weights(
        {layer.weight: carrier.weight(layer) * (1 + change) for layer in layers}
    )
    runs, runner_of = [0], noise.runner_of
    monkeypatch.setattr(noise, "runner_of", lambda *a, **k: Counted(runner_of(*a, **k), runs))
    measured = measured_noise(changed, carrier, [{"image": sample_images(3, 2)}]).layers
    assert len(measured) == len(layers)
    for found in measured.values():
        assert found.own is not None
        assert found.reached is not None
        assert 0 < found.own < 10 * change**2
        assert (found.reached > 0) == reaches
    # The layers, cut out; float layers read no rounded value, and give what they did in the model.
    assert runs[0] == 1 + 1 + (len(layers) if reaches else 0)


def test_the_runs_that_follow_noise_to_the_outputs_share_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    onnx.save(tiny_onnx(), tmp_path / "model.onnx")
    carrier = open_onnx(tmp_path / "model.onnx", 21)
    changed = carrier.with_weights({x.weight: carrier.weight(x) * 2 for x in carrier.layers()})
    opened = Mock(wraps=noise.runner_of)
    monkeypatch.setattr(noise, "runner_of", opened)
    measured_noise(changed, carrier, [{"image": sample_images(3, 2)}])
    # The layers, cut out, whose outputs stay while they run again; and the model with offsets.
    assert [call.kwargs.get("arena", True) for call in opened.mock_calls] == [False, True]
