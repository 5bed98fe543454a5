"""prune-magnitude on models: what goes, what is said, what is refused; alike on three carriers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from compressor.errors import ModelError, SpecError
from compressor.passes.prune.magnitude import cuts as magnitude_cuts
from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from tests.compressor.passes.prune.magnitude_models import (
    ANY,
    COLUMNS,
    ROWS,
    WIDE,
    matrices,
    pruned,
    weights,
)
from tests.compressor.passes.quantize.weight_only_models import IMAGE, Language, Mixed, carrier
from tests.two_linears import on_onnx, on_safetensors, on_torch

OPTIONS: list[dict[str, Any]] = [
    {"sparsity": 0.5},
    {"sparsity": 0.37, "scope": "global"},
    {"sparsity": 0.5, "norm": "random"},
    {"sparsity": 0.3, "norm": "random", "scope": "global"},
    {"sparsity": 0.5, "granularity": "block", "block": [1, 4]},
    {"sparsity": 0.6, "granularity": "block", "block": [4, 1], "norm": "l2", "scope": "global"},
    {"sparsity": 0.4, "granularity": "block", "block": [16, 16], "scope": "global"},
]


def declared(options: Mapping[str, Any]) -> PruneMagnitude:
    """Read options as a spec's are read."""
    return PruneMagnitude.model_validate_json(json.dumps(options))


@pytest.fixture(scope="module")
def mixed() -> Carrier:
    return carrier(Mixed(), IMAGE)


# ------------------------------------------------------------------------------- what goes


@pytest.mark.parametrize("options", OPTIONS)
def test_three_carriers_give_the_same_bits(tmp_path: Path, options: dict[str, Any]):
    tensors = weights()
    found = [
        pruned(model, declared(options))
        for model in (
            on_torch(tensors),
            on_onnx(tensors, tmp_path),
            on_safetensors(tensors, tmp_path),
        )
    ]
    assert [list(own) for own in found] == [["up", "down"], ["up", "down"], ["down", "up"]]
    for name in ("up", "down"):
        assert bool((found[0][name] == 0).any())
        for other in found[1:]:
            assert torch.equal(found[0][name].view(torch.int32), other[name].view(torch.int32))


@pytest.mark.parametrize("options", OPTIONS)
def test_exactly_so_many_units_go_and_the_others_stay(options: dict[str, Any]):
    before = {name: m + 0.01 * (m == 0) for name, m in matrices(on_torch(weights())).items()}
    model = on_torch({**weights(), **{f"{name}.weight": m for name, m in before.items()}})
    after = pruned(model, declared(options))
    height, width = options.get("block", [1, 1])
    units = {
        name: (own == 0).reshape(len(own) // height, height, -1, width).float().mean((1, 3))
        for name, own in after.items()
    }
    for name, own in after.items():
        assert torch.equal(own[own != 0], before[name][own != 0])
        assert set(units[name].reshape(-1).tolist()) <= {0.0, 1.0}  # blocks go whole
    gone = {name: int(own.sum()) for name, own in units.items()}
    if options.get("scope") == "global":
        total = sum(own.numel() for own in units.values())
        assert sum(gone.values()) == int(options["sparsity"] * total + 1e-9)
    else:
        assert gone == {
            n: int(options["sparsity"] * own.numel() + 1e-9) for n, own in units.items()
        }


def test_all_layers_are_ranked_against_each_other():
    model = on_torch(weights())
    before, after = matrices(model), pruned(model, declared({"sparsity": 0.5, "scope": "global"}))
    kept = torch.cat([before[n][after[n] != 0].abs() for n in before])
    gone = torch.cat([before[n][after[n] == 0].abs() for n in before])
    assert float(kept.min()) >= float(gone.max())
    shares = {n: float((own == 0).float().mean()) for n, own in after.items()}
    assert shares["up"] > 0.6 > 0.45 > shares["down"]  # the weights of "up" are half as large


def test_of_equal_weights_the_first_go():
    tensors = {name: torch.ones_like(tensor) for name, tensor in weights().items()}
    after = pruned(on_torch(tensors), declared({"sparsity": 0.5}))
    for own in after.values():
        assert torch.equal(own.reshape(-1) == 0, torch.arange(own.numel()) < own.numel() // 2)
    after = pruned(on_torch(tensors), declared({"sparsity": 0.75, "scope": "global"}))
    number = int(0.75 * (WIDE * COLUMNS + WIDE * ROWS))
    every = torch.cat([after["down"].reshape(-1), after["up"].reshape(-1)])
    assert torch.equal(every == 0, torch.arange(len(every)) < number)


def test_weights_that_are_zero_already_count():
    tensors = weights()
    tensors["up.weight"][:, : COLUMNS // 4] = 0
    for norm in ("l1", "random"):
        after = pruned(on_torch(tensors), declared({"sparsity": 0.4, "norm": norm}))
        assert int((after["up"] == 0).sum()) == int(0.4 * WIDE * COLUMNS)
    few = declared({"sparsity": 0.1}).apply(on_torch(tensors), ANY, {})
    zero = int((tensors["up.weight"] == 0).sum())
    assert torch.equal(matrices(few.carrier)["up"], tensors["up.weight"])
    own = next(row for row in few.layers if row.name == "up")
    assert own.details["zero_percent"] == pytest.approx(100 * zero / (WIDE * COLUMNS), abs=1e-4)
    assert own.weight_sqnr_db is None


def test_the_seed_picks_random_weights():
    model, random = on_torch(weights()), declared({"sparsity": 0.5, "norm": "random"})
    found = [
        matrices(random.apply(model, PassContext(seed), {}).carrier)["up"] for seed in (0, 0, 1)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(OPTIONS), st.integers(200, 5000))
def test_the_size_of_blocks_of_rows_does_not_matter(options: dict[str, Any], elements: int):
    model = on_torch(weights(3))
    expected = pruned(model, declared(options))
    real = magnitude_cuts.row_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            magnitude_cuts, "row_blocks", lambda layer, multiple: real(layer, multiple, elements)
        )
        found = pruned(model, declared(options))
    assert all(torch.equal(found[name], own) for name, own in expected.items())


def test_other_layers_and_dtypes(mixed: Carrier):
    outcome = declared({"sparsity": 0.5}).apply(mixed, ANY, {})
    assert [row.name for row in outcome.layers] == ["conv", "depth", "wide", "fc", "last"]
    for name, own in matrices(outcome.carrier).items():
        assert int((own == 0).sum()) == own.numel() // 2, name
    doubles = carrier(Mixed().double(), IMAGE.__class__("image", IMAGE.shape, "float64"))
    for name, own in pruned(doubles, declared({"sparsity": 0.5})).items():
        assert own.dtype == torch.float64
        assert int((own == 0).sum()) == own.numel() // 2, name


# ------------------------------------------------------------------------------- what is said


def test_rules_and_reports():
    rules = [{"match": "up", "sparsity": 0.25}, {"match": "down", "skip": True}]
    step = declared({"sparsity": 0.5, "layers": rules})
    model = on_torch(weights())
    plan = {row.name: row for row in step.survey(model, ANY).layers}
    assert plan["up"].action == "25 % zero"
    assert (plan["down"].action, plan["down"].reason) == ("keep", "skipped by the rule 'down'")
    outcome = step.apply(model, ANY, {})
    (layer,) = outcome.layers
    assert layer.scheme == "float32, 25.0 % zero"
    assert layer.details["zero_percent"] == 25
    after = matrices(outcome.carrier)["up"]
    lost = weights()["up.weight"][after == 0].abs().max()
    assert layer.details["threshold"] == float(lost)
    assert layer.weight_sqnr_db is not None
    assert layer.weight_sqnr_db > 10
    assert outcome.notes == ("25.0 % of 6,144 weights in 1 layers are zero",)


def test_the_plan_names_blocks_and_scope():
    options = {"granularity": "block", "block": [4, 1], "scope": "global", "norm": "random"}
    rows = declared({"sparsity": 0.125, **options}).survey(on_torch(weights()), ANY).layers
    assert {row.action for row in rows} == {"12.5 % zero, 4x1, random, global"}


def test_tables_and_what_shares_them_are_kept():
    step = declared({"sparsity": 0.5})
    rows = {row.name: row for row in step.survey(carrier(Language()), ANY).layers}
    assert rows["embed_tokens"].reason == "a table is looked up, not multiplied"
    assert rows["lm_head"].touched
    tied = step.survey(carrier(Language(tied=True)), ANY).layers
    assert [row.reason for row in tied if not row.touched] == [
        "a table is looked up, not multiplied"
    ]


def test_a_layer_that_blocks_do_not_fit_is_kept_with_the_reason(mixed: Carrier):
    step = declared({"sparsity": 0.5, "granularity": "block", "block": [1, 4]})
    reasons = {row.name: row.reason for row in step.survey(mixed, ANY).layers}
    assert reasons["conv"] == "8 rows of 27 columns do not divide into blocks of 1x4"
    assert reasons["fc"] == ""


def test_a_layer_of_which_nothing_is_left_is_named():
    tensors = weights()
    tensors["up.weight"] /= 1000
    outcome = declared({"sparsity": 0.6, "scope": "global"}).apply(on_torch(tensors), ANY, {})
    assert "nothing is left of 1 layers, such as 'up'" in outcome.notes[1]


def test_planning_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("a weight was read")

    model = on_safetensors(weights(), tmp_path)
    for tensor in model.tensors().values():
        monkeypatch.setattr(type(tensor.read), "__call__", refuse)
        monkeypatch.setattr(type(tensor.read), "rows", refuse)
    step = declared({"sparsity": 0.5, "scope": "global"})
    assert all(row.touched for row in step.survey(model, ANY).layers)
    assert step.preview(model, ANY, {}) is model


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.5, 1.5])
def test_a_share_out_of_range(sparsity: float):
    with pytest.raises(ValidationError, match="sparsity"):
        declared({"sparsity": sparsity})


@pytest.mark.parametrize("block", [[0, 4], [4], [1, 2, 3], [1.5, 4]])
def test_a_block_that_is_none(block: list[float]):
    with pytest.raises(ValidationError, match="block"):
        declared({"sparsity": 0.5, "granularity": "block", "block": block})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"granularity": "block"},
        "granularity 'block': needs a block; set one, such as block: [1, 4]",
    ),
    (
        {"block": [1, 4]},
        "block [1, 4]: is set, but granularity is weight; set granularity: block, or remove block",
    ),
    (
        {"granularity": "block", "block": [512, 1]},
        "pass 'prune-magnitude': touches no layer: 1 of 2: 96 rows of 64 columns do not divide "
        "into blocks of 512x1; 1 of 2: 48 rows of 96 columns do not divide into blocks of 512x1; "
        "change its rules or options, or remove it",
    ),
    (
        {"layers": [{"match": "ub", "skip": True}]},
        "layer rule 'ub': matches no layer; did you mean 'up'?",
    ),
    (
        {"layers": [{"match": "*", "skip": True}]},
        "pass 'prune-magnitude': touches no layer: 2 of 2: skipped by the rule '*'; change its "
        "rules or options, or remove it",
    ),
    (
        {"scope": "global", "layers": [{"match": "up", "sparsity": 0.3}]},
        "layer rule 'up': sets sparsity 0.3, but scope is global; remove its sparsity, or set "
        "scope: layer",
    ),
    (
        {"layers": [{"match": "up", "sparsity": 0.3, "skip": True}]},
        "layer rule 'up': sets sparsity 0.3, but also skips its layers; remove its sparsity",
    ),
    (
        {
            "granularity": "block",
            "block": [16, 64],
            "layers": [{"match": "down", "sparsity": 0.3}],
        },
        "layer 'down': cannot have the sparsity of the rule 'down': 48 rows of 96 "
        "columns do not divide into blocks of 16x64; narrow the rule's match, or change the "
        "block or the sparsity",
    ),
    (
        {"sparsity": 1e-6},
        "pass 'prune-magnitude': touches no layer: 1 of 2: 1e-06 of its 6144 weights "
        "rounds down to none; 1 of 2: 1e-06 of its 4608 weights rounds down to none; change its "
        "rules or options, or remove it",
    ),
    (
        {"sparsity": 1e-6, "scope": "global"},
        "pass 'prune-magnitude': sparsity 1e-06 of 10752 weights rounds down to none; "
        "raise sparsity, or remove the pass",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_fit_is_refused_at_plan_time(options: dict[str, Any], message: str):
    with pytest.raises(SpecError) as caught:
        declared({"sparsity": 0.5, **options}).survey(on_torch(weights()), ANY)
    assert str(caught.value) == message


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_weights_that_are_not_finite(tmp_path: Path, scope: str):
    tensors = weights()
    tensors["down.weight"][3, 4] = float("nan")
    model = on_safetensors(tensors, tmp_path)
    message = "layer 'down': its weight holds values that are NaN or infinite; "
    with pytest.raises(ModelError, match=re.escape(message)):
        declared({"sparsity": 0.5, "scope": scope}).apply(model, ANY, {})


def test_quantized_layers_are_kept(tmp_path: Path):
    from compressor.passes.quantize.weights.weights import QuantizeWeights

    for model in (on_torch(weights()), on_safetensors(weights(), tmp_path)):
        codes = QuantizeWeights(bits=8).apply(model, ANY, {}).carrier
        with pytest.raises(SpecError, match="2 of 2: its weight is int8: prune before quantizing"):
            declared({"sparsity": 0.5}).survey(codes, ANY)
