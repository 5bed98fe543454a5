"""prune-sparsegpt on whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import DataError
from compressor.passes.prune.sparse.passes import PruneSparsegpt, PruneWanda
from tests.compressor.passes.prune.sparse_models import (
    ANY,
    all_but,
    applied,
    language,
    output_error,
    pictures,
    weights,
)
from tests.compressor.tiny_project import onnx_project


def sparsegpt(**options: Any) -> PruneSparsegpt:
    return PruneSparsegpt.model_validate(options, strict=False)


@pytest.mark.parametrize("options", [{"sparsity": 0.5}, {"sparsity": 0.7}, {"n": 2, "m": 4}])
@pytest.mark.parametrize(
    ("build", "name"), [(language, "down.0"), (pictures, "body"), (pictures, "grouped")]
)
def test_it_loses_less_than_masks_alone(
    tmp_path: Path, options: dict[str, Any], build: Any, name: str
):
    """``grouped`` has two groups of channels, each with a moment of its own."""
    model = build()
    given = {**options, "layers": all_but(model, name)}
    own = applied(sparsegpt(**given), model, tmp_path).carrier
    other = applied(PruneWanda.model_validate(given, strict=False), model, tmp_path).carrier
    assert output_error(model, own, name) < 0.8 * output_error(model, other, name)


def test_the_share_holds_for_the_layer_and_what_stays_changes(tmp_path: Path):
    model = language()
    outcome = applied(sparsegpt(sparsity=0.75), model, tmp_path)
    found, dense = weights(outcome.carrier)["down.0"], weights(model)["down.0"]
    assert int((found == 0).sum()) == round(found.numel() * 0.75)
    assert len(set((found == 0).sum(1).tolist())) > 1, "rows keep unlike numbers"
    kept = found != 0
    assert not torch.equal(found[kept], dense[kept])
    assert outcome.notes == ("6,912 of 9,216 weights of 6 layers are zero (75.0 %)",)


def test_layers_that_read_the_same_value_share_a_request():
    survey = sparsegpt().survey(language(), ANY)
    assert sparsegpt().by_block
    assert len(survey.requests) == 4, "gate and up read the same value"
    assert {request.observer for request in survey.requests} == {"second-moment"}


def test_the_same_run_gives_the_same_bytes(tmp_path: Path):
    project = onnx_project(tmp_path)
    project.spec["passes"] = [{"pass": "prune-sparsegpt", "sparsity": 0.5}]
    project.run()
    first = project.artifacts()
    layers = {x["name"]: x["sparsity"] for x in project.report()["passes"][0]["layers"]}
    assert layers["conv2"] == layers["fc"] == 50.0
    project.run(fresh=True)
    assert project.artifacts() == first


def test_a_layer_without_statistics_is_an_error():
    class Blind:
        weights = ("up.0.weight",)
        statistics: dict[str, Any] = {}  # noqa: RUF012

        def kept(self, make: Any) -> Any:
            return make()

        def replace(self, changes: Any) -> None:
            raise AssertionError(changes)

    with pytest.raises(DataError, match="calibration found nothing about its input"):
        sparsegpt().apply(language(), replace(ANY, blocks=[Blind()]), {})  # type: ignore[arg-type]
