"""prune-wanda on whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import DataError, SpecError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.passes.prune.sparse import pruning
from compressor.passes.prune.sparse.passes import PruneNm, PruneWanda
from tests.compressor.passes.prune.sparse_models import (
    ANY,
    IMAGE,
    applied,
    batches,
    language,
    pictures,
    reasons,
    weights,
)
from tests.compressor.tiny_project import onnx_project


def wanda(**options: Any) -> PruneWanda:
    return PruneWanda.model_validate(options, strict=False)


def test_every_row_loses_the_same_number(tmp_path: Path):
    outcome = applied(wanda(sparsity=0.6), language(), tmp_path)
    found = weights(outcome.carrier)
    assert bool(((found["up.0"] == 0).sum(1) == round(32 * 0.6)).all())
    assert bool(((found["down.1"] == 0).sum(1) == round(48 * 0.6)).all())
    assert {x.scheme for x in outcome.layers} == {"float32, 60 % sparse"}


def test_kept_weights_do_not_change_and_columns_with_large_inputs_stay(tmp_path: Path):
    before = pictures()
    found = weights(applied(wanda(), before, tmp_path).carrier)["stem"]
    dense = weights(before)["stem"].detach()
    kept = found != 0
    assert torch.equal(found[kept], dense[kept])
    patches = torch.cat(
        [
            torch.nn.functional.unfold(torch.from_numpy(b["image"]), 3, padding=1)
            for b in batches(IMAGE)
        ]
    )
    scores = dense.reshape(8, 27).abs() * patches.square().sum((0, 2)).sqrt()
    wanted = torch.zeros(8, 27, dtype=torch.bool)
    wanted.scatter_(1, scores.topk(27 - round(27 * 0.5), dim=1).indices, True)
    assert torch.equal(kept.reshape(8, 27), wanted)


def test_later_blocks_see_the_pruned_ones(tmp_path: Path):
    """The last layers keep other weights when the blocks before them are not pruned."""
    model = language()
    alone = [{"match": "*.0", "skip": True}]
    together = weights(applied(wanda(sparsity=0.7), model, tmp_path).carrier)
    apart = weights(applied(wanda(sparsity=0.7, layers=alone), model, tmp_path).carrier)
    assert torch.equal(apart["up.0"], weights(model)["up.0"])
    assert not torch.equal(together["down.1"], apart["down.1"])


def test_n_of_m_is_what_prune_nm_does(tmp_path: Path):
    model = pictures()
    own = weights(applied(wanda(n=2, m=4), model, tmp_path).carrier)
    other = weights(applied(PruneNm(criterion="wanda"), model, tmp_path).carrier)
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_all_widths_take_a_share(tmp_path: Path):
    found = reasons(wanda(), pictures())
    assert [name for name, reason in found.items() if reason] == ["wide"]
    assert "by magnitude" in found["wide"]
    declared = wanda(layers=[{"match": "fc", "n": 1, "m": 3}, {"match": "stem", "sparsity": 0.25}])
    rows = {row.name: row.action for row in declared.survey(pictures(), ANY).layers}
    assert (rows["fc"], rows["stem"], rows["last"]) == ("1:3", "25 % sparse", "50 % sparse")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sparsity": 0.5, "n": 2, "m": 4},
            "sparsity: 0.5: is given together with n: 2, m: 4, which is a sparsity of 0.5; "
            "give one of them",
        ),
        ({"n": 2}, "n: 2: is given without m; give both"),
        ({"m": 4}, "m: 4: is given without n; give both"),
        ({"n": 6, "m": 4}, "n: 6, m: 4: cannot keep 6 of 4 weights"),
        ({"layers": [{"match": "up.0", "m": 2}]}, "layer rule 'up.0': m: 2: is given without n"),
        ({"layers": [{"match": "*", "skip": True}]}, "pass 'prune-wanda': touches no layer"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str):
    with pytest.raises(SpecError) as caught:
        wanda(**options).survey(language(), ANY)
    assert message in str(caught.value)


@pytest.mark.parametrize(("sparsity", "message"), [(1.0, "less than 1"), (0.0, "greater than 0")])
def test_a_share_out_of_range_is_refused_by_the_spec(tmp_path: Path, sparsity: float, message: str):
    project = onnx_project(tmp_path)
    project.spec["passes"] = [{"pass": "prune-wanda", "sparsity": sparsity}]
    with pytest.raises(SpecError, match=message):
        project.plan()


def test_without_data_or_a_model_that_runs(tmp_path: Path):
    project = onnx_project(tmp_path)
    project.spec["passes"] = [{"pass": "prune-wanda"}]
    del project.spec["data"]["calibration"]
    with pytest.raises(SpecError, match=r"there is no calibration data; add data\.calibration"):
        project.plan()
    from safetensors.torch import save_file

    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "bare.safetensors")
    lacking = wanda().required - open_checkpoint(tmp_path / "bare.safetensors").offers
    assert lacking == {"run", "graph"}


def test_a_layer_without_statistics_is_an_error():
    class Blind:
        weights = ("up.0.weight",)
        statistics: dict[str, Any] = {}  # noqa: RUF012

        def kept(self, make: Any) -> Any:
            return make()

        def replace(self, changes: Any) -> None:
            raise AssertionError(changes)

    with pytest.raises(DataError, match=r"layer 'up\.0': calibration found nothing about its"):
        wanda().apply(language(), replace(ANY, blocks=[Blind()]), {})  # type: ignore[arg-type]


def test_rows_are_sorted_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The order of a large weight takes several times its bytes."""
    whole = weights(applied(wanda(sparsity=0.6), language(), tmp_path).carrier)
    seen: list[int] = []
    mask = pruning.pattern_mask

    def noted(scores: torch.Tensor, pattern: Any) -> torch.Tensor:
        seen.append(scores.numel())
        return mask(scores, pattern)

    monkeypatch.setattr(pruning, "pattern_mask", noted)
    monkeypatch.setattr(pruning, "_AT_ONCE", 200)
    found = weights(applied(wanda(sparsity=0.6), language(), tmp_path).carrier)
    assert max(seen) <= 200
    assert len(seen) > len(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
