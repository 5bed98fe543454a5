"""Several targets as a dictionary, through a training, its callbacks and the evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import compressor
from compressor import RunOptions, Spec, TrainingStep
from compressor.errors import DataError, SpecError
from tests.compressor.tiny_project import sample_images, tiny_module


def loss(outputs: Tensor, target: dict[str, Tensor]) -> Tensor:
    assert sorted(target) == ["kind", "weight"]
    each = torch.nn.functional.cross_entropy(outputs, target["kind"], reduction="none")
    return each * target["weight"]


def metric(outputs: np.ndarray, target: dict[str, np.ndarray]) -> np.ndarray:
    return (outputs.argmax(1) == target["kind"]) * target["weight"]


def batches() -> list[tuple[Tensor, dict[str, Tensor]]]:
    images = torch.from_numpy(sample_images(1))
    with torch.no_grad():
        kinds = tiny_module().eval()(images).argmax(1)
    weights = torch.linspace(0.5, 1.5, len(images))
    return [
        (images[i : i + 8], {"kind": kinds[i : i + 8], "weight": weights[i : i + 8]})
        for i in range(0, len(images), 8)
    ]


def spec(folder: Path, **options: Any) -> Spec:
    given = batches()
    return Spec(
        name="several",
        model=tiny_module(),
        data={"training": given, "evaluation": given},
        metric=metric,
        passes=[{"pass": "finetune", "steps": 4, "learning-rate": 1e-3, **options}],
        exports=[{"format": "safetensors"}],
        output=folder / "out",
    )


def test_losses_and_metrics_get_a_dictionary(tmp_path: Path):
    seen: list[TrainingStep] = []
    given = spec(tmp_path, loss=loss, mixup=0.2)
    result = compressor.run(given, RunOptions(callbacks=[seen.append]))
    assert [step.step for step in seen] == [1, 2, 3, 4]
    assert seen[0].name == "finetune"
    baseline = result.report["baseline"]["metric"]
    mean = np.mean(torch.cat([batch[1]["weight"] for batch in batches()]).numpy())
    assert baseline["value"] == pytest.approx(mean, rel=1e-6)  # all kinds are its own answers


@pytest.mark.parametrize("metric", [None, "f1", "mse"])
def test_a_metric_of_one_target_is_refused(tmp_path: Path, metric: str | None):
    given = replace(spec(tmp_path), metric=metric, passes=())
    with pytest.raises(DataError, match="takes one target, and the data have 'kind', 'weight'"):
        compressor.run(given)


def test_a_loss_for_one_target_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="takes one target, and the data have 'kind', 'weight'"):
        compressor.run(spec(tmp_path, loss="cross-entropy"))
