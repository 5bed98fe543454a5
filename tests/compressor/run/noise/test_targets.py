"""Targets with which the effect of a layer's noise on the metric is measured, in whole runs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from compressor.models.onnx.carrier import open_onnx
from tests.compressor.tiny_project import ONNX, Project, sample_images, tiny_onnx


def test_each_sample_of_a_large_fixed_batch_has_its_own_target(on_onnx: Project):
    """The first 16 targets served a batch of 24, so that the last samples had others' targets."""
    batch, images = 24, sample_images(1)
    onnx.save(tiny_onnx(batch=batch), on_onnx.folder / ONNX)
    runner = open_onnx(on_onnx.folder / ONNX, 21).runner()
    parts = np.split(images, len(images) // batch)
    answers = np.concatenate([runner.run({"image": part})["logits"] for part in parts])
    np.savez(on_onnx.folder / "test.npz", image=images, label=answers)
    for role in ("calibration", "evaluation"):
        del on_onnx.spec["data"][role]["batch"]
    on_onnx.spec["metric"] = "mse"
    on_onnx.spec["passes"] = [{"pass": "quantize-static", "prepare": "none"}]
    result = on_onnx.run()
    assert result.exit_code == 0, result.report
    rows = result.report["passes"][0]["attribution"]["layers"]
    assert len(rows) == 3
    # The float model is right, so that its noise is its error.
    power = float(np.square(answers[:batch]).mean())
    for row in rows:
        noise = power * 10 ** (-row["output_sqnr_db"] / 10)
        assert row["metric_noise"] == pytest.approx(noise, rel=1e-3)
