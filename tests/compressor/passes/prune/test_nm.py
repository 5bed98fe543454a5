"""prune-nm on whole models: layouts, layers that cannot take it, carriers, and bad options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from compressor.errors import ModelError, SpecError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.passes.prune.batch_statistics import re_estimated
from compressor.passes.prune.sparse.passes import PruneNm
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.prune import structured_models
from tests.compressor.passes.prune.sparse_models import (
    ANY,
    all_but,
    applied,
    carrier,
    language,
    output_error,
    pictures,
    reasons,
    weights,
)
from tests.compressor.tiny_project import onnx_project
from tests.two_linears import drawn, on_onnx, on_safetensors, on_torch

CRITERIA = ("magnitude", "wanda", "sparsegpt")


def prune(**options: Any) -> PruneNm:
    return PruneNm.model_validate(options, strict=False)


def tensorrt_accepts(weight: torch.Tensor, n: int = 2, m: int = 4) -> bool:
    """Look at each output channel and position of ``[K, C, R, S]`` as TensorRT's guide does."""
    k, c, r, s = weight.shape
    return all(
        int(torch.count_nonzero(weight[o, first : first + m, y, x])) <= n
        for o in range(k)
        for y in range(r)
        for x in range(s)
        for first in range(0, c, m)
    )


@pytest.mark.parametrize("criterion", CRITERIA)
def test_convolutions_are_sparse_along_their_input_channels(tmp_path: Path, criterion: str):
    before = pictures()
    outcome = applied(prune(criterion=criterion), before, tmp_path)
    found = weights(outcome.carrier)
    for name in ("body", "grouped", "point"):
        assert tensorrt_accepts(found[name]), name
        assert float((found[name] == 0).float().mean()) == 0.5
    assert not tensorrt_accepts(weights(before)["body"])
    # Rows of a transposed convolution lie on its second axis, the summed channels on its first.
    assert tensorrt_accepts(found["wide"].transpose(0, 1))
    assert found["stem"].count_nonzero() == found["stem"].numel()


def test_the_largest_weights_of_each_group_stay(tmp_path: Path):
    before = pictures()
    found = weights(applied(prune(n=1), before, tmp_path).carrier)
    dense = weights(before)["body"].detach()
    groups = found["body"].reshape(16, 2, 4, 9)
    assert bool((groups.count_nonzero(dim=2) == 1).all())
    assert torch.equal(groups.abs().amax(2), dense.reshape(16, 2, 4, 9).abs().amax(2))
    kept = found["body"] != 0
    assert torch.equal(found["body"][kept], dense[kept])


def test_layers_that_cannot_take_it_say_why():
    found = reasons(prune(), pictures())
    assert found == {
        "stem": "3 input channels do not divide into groups of 4",
        "body": "",
        "grouped": "",
        "depth": "1 input channel in each of its 16 groups: no multiple of 4",
        "point": "",
        "wide": "",
        "fc": "6 input columns do not divide into groups of 4",
        "last": "10 input columns do not divide into groups of 4",
    }
    found = reasons(prune(layers=[{"match": "up.*", "skip": True}]), language())
    assert found["embed_tokens"] == "a table is looked up, not multiplied"
    assert found["lm_head"] == "it is the output layer"
    assert found["up.0"] == "skipped by the rule 'up.*'"
    assert found["down.1"] == ""


def test_a_layer_that_calibration_does_not_see_is_pruned_by_magnitude(tmp_path: Path):
    model = pictures()
    seen = prune(criterion="sparsegpt")
    assert "by magnitude" in reasons(seen, model)["wide"]
    by_size = weights(applied(prune(), model, tmp_path).carrier)
    by_data = weights(applied(seen, model, tmp_path).carrier)
    assert torch.equal(by_size["wide"], by_data["wide"])
    assert not torch.equal(by_size["body"], by_data["body"])


def test_rules_change_the_pattern_of_single_layers(tmp_path: Path):
    declared = prune(layers=[{"match": "up.0", "n": 1}, {"match": "gate.*", "n": 2, "m": 8}])
    model = language()
    rows = {row.name: row.action for row in declared.survey(model, ANY).layers}
    assert (rows["up.0"], rows["up.1"], rows["gate.1"]) == ("1:4", "2:4", "2:8")
    found = weights(applied(declared, model, tmp_path).carrier)
    for name, n, m in (("up.0", 1, 4), ("up.1", 2, 4), ("gate.1", 2, 8)):
        counts = found[name].reshape(-1, m).count_nonzero(dim=1)
        assert bool((counts == n).all()), name


@pytest.mark.parametrize("criterion", CRITERIA)
def test_outcomes_say_what_was_kept(tmp_path: Path, criterion: str):
    outcome = applied(prune(criterion=criterion), language(), tmp_path)
    assert [x.name for x in outcome.layers] == [
        f"{n}.{i}" for i in range(2) for n in ("gate", "up", "down")
    ]
    for layer in outcome.layers:
        assert layer.scheme == "float32, 2:4"
        # Of normally distributed weights 2:4 keeps four fifths; wanda does not go by size.
        assert 0.5 < layer.details["kept_magnitude"] < 0.85
        assert layer.weight_sqnr_db is not None
        assert 0 < layer.weight_sqnr_db < 15
    assert outcome.notes == ("4,608 of 9,216 weights of 6 layers are zero (50.0 %)",)


@pytest.mark.parametrize(
    ("build", "name"), [(language, "down.0"), (pictures, "grouped"), (pictures, "point")]
)
def test_criteria_that_see_data_lose_less(tmp_path: Path, build: Any, name: str):
    model, lost = build(), {}
    for criterion in CRITERIA:
        declared = prune(criterion=criterion, layers=all_but(model, name))
        outcome = applied(declared, model, tmp_path)
        lost[criterion] = output_error(model, outcome.carrier, name)
    assert lost["sparsegpt"] < 0.8 * lost["wanda"]
    assert lost["wanda"] < lost["magnitude"]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(
    ("build", "name"), [(language, "down.0"), (pictures, "grouped"), (pictures, "point")]
)
def test_what_stays_can_be_solved(tmp_path: Path, build: Any, name: str, criterion: str):
    model = build()
    given = {"criterion": criterion, "layers": all_but(model, name)}
    plain = applied(prune(**given), model, tmp_path).carrier
    solved = applied(prune(**given, reconstruct=True), model, tmp_path).carrier
    weight = weights(solved)[name]
    assert float((weight == 0).float().mean()) == 0.5
    if criterion == "magnitude":  # moments are those of fewer inputs than norms
        assert torch.equal(weight == 0, weights(plain)[name] == 0)
    share = output_error(model, solved, name) / output_error(model, plain, name)
    assert share < (1.0 if criterion == "sparsegpt" else 0.8)


def test_groups_in_another_order_are_solved_in_it(tmp_path: Path):
    model = pictures()
    given = {"permute": True, "layers": all_but(model, "point")}
    plain, solved = (
        applied(prune(**given, reconstruct=flag), model, tmp_path).carrier for flag in (False, True)
    )
    assert torch.equal(weights(plain)["point"] == 0, weights(solved)["point"] == 0)
    assert output_error(model, solved, "point") < 0.8 * output_error(model, plain, "point")


def test_statistics_are_estimated_anew_on_request(tmp_path: Path):
    model = structured_models.carrier(structured_models.Residual())
    context = PassContext(samples=structured_models.data())
    step = prune(re_estimate=True)
    assert step.replays == "to re-estimate batch-norm statistics"
    assert step.required == {"weights", "run", "graph"}
    outcome = step.apply(model, context, {})
    plain = prune().apply(model, context, {}).carrier
    wanted = re_estimated(plain, structured_models.data().batches()).tensors()
    changed = [n for n, t in outcome.carrier.tensors().items() if "running_mean" in n]
    assert changed
    for name in changed:
        assert torch.equal(outcome.carrier.tensors()[name].read(), wanted[name].read()), name
    assert "batch-norm statistics were re-estimated on the calibration data" in outcome.notes
    with pytest.raises(SpecError, match="the model has no batch normalization"):
        step.survey(language(), ANY)


def test_what_it_needs_depends_on_the_criterion():
    assert prune().required == {"weights"}
    assert prune(criterion="wanda").required == {"weights", "run", "graph"}
    assert prune(reconstruct=True).required == {"weights", "run", "graph"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4}, "n: 4, m: 4: keeps all of every 4 weights; give an n below m"),
        ({"n": 5}, "n: 5, m: 4: cannot keep 5 of 4 weights; give an n below m"),
        ({"layers": [{"match": "up.*", "m": 2}]}, "layer rule 'up.*': n: 2, m: 2: keeps all"),
        ({"layers": [{"match": "up.0", "m": 5}]}, "layer 'up.0': 32 input columns do not divide"),
        ({"layers": [{"match": "upp"}]}, "layer rule 'upp': matches no layer"),
        ({"m": 7}, "pass 'prune-nm': touches no layer: 4 of 8: 32 input columns do not divide"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str):
    with pytest.raises(SpecError) as caught:
        prune(**options).survey(language(), ANY)
    assert message in str(caught.value)


def test_n_below_one_is_refused_by_the_spec(tmp_path: Path):
    project = onnx_project(tmp_path)
    project.spec["passes"] = [{"pass": "prune-nm", "n": 0}]
    with pytest.raises(SpecError, match="greater than or equal to 1"):
        project.plan()


def test_a_criterion_without_data_is_refused_by_the_plan(tmp_path: Path):
    project = onnx_project(tmp_path)
    del project.spec["data"]["calibration"]
    project.spec["passes"] = [{"pass": "prune-nm", "criterion": "wanda"}]
    with pytest.raises(SpecError) as caught:
        project.plan()
    assert str(caught.value).endswith(
        "pass 'prune-nm': needs statistics of 2 tensors, and there is no calibration data; "
        "add data.calibration"
    )
    project.spec["passes"] = [{"pass": "prune-nm"}]
    assert [row.actions for row in project.plan().rows] == [("keep",), ("2:4",), ("2:4",)]


def test_a_run_exports_zeros_and_resumes(tmp_path: Path):
    project = onnx_project(tmp_path)
    project.spec["passes"] = [{"pass": "prune-nm", "criterion": "sparsegpt"}]
    project.run()
    layers = {x["name"]: x for x in project.report()["passes"][0]["layers"]}
    assert layers["conv2"]["sparsity"] == layers["fc"]["sparsity"] == 50.0
    assert layers["conv2"]["scheme"] == "float32, 2:4"
    model = onnx.load(project.output / "model.onnx")
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    assert tensorrt_accepts(torch.from_numpy(stored["conv2.weight"].copy()))
    first = project.artifacts()
    project.run(fresh=True)
    assert project.artifacts() == first


def test_targets_without_sparse_kernels_are_named():
    context = PassContext(0, frozenset({"tensorrt"}))
    (note,) = prune().survey(language(), context).notes
    assert note.startswith("TensorRT uses kernels for 2:4 in float16 or int8")
    (note,) = prune(n=1).survey(language(), context).notes
    assert note == "TensorRT has sparse kernels for 2:4 only; it computes 1:4 densely"


def three_carriers(folder: Path) -> list[Carrier]:
    """The same weights in a module, an ONNX file that holds one transposed, and a checkpoint."""
    tensors = drawn(64, 96, 48)
    tensors["down.weight"].mul_(8).round_()  # equal sizes, so that the order of ties shows
    return [on_torch(tensors), on_onnx(tensors, folder), on_safetensors(tensors, folder)]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (5, 32)])
def test_carriers_agree_bit_by_bit(tmp_path: Path, n: int, m: int):
    found = []
    for model in three_carriers(tmp_path):
        after = prune(n=n, m=m).apply(model, ANY, {}).carrier
        found.append({x.name: x.canonical(after.weight(x)) for x in after.layers()})
    assert all(sorted(own) == ["down", "up"] for own in found)
    for name, first in found[0].items():
        assert bool((first.reshape(-1, m).count_nonzero(dim=1) <= n).all())
        for other in found[1:]:
            assert torch.equal(first, other[name]), name


def test_a_streamed_checkpoint_is_pruned_when_it_is_read(tmp_path: Path):
    model = three_carriers(tmp_path)[2]
    outcome = prune().apply(model, ANY, {})
    assert outcome.notes == ("5,376 of 10,752 weights of 2 layers are zero (50.0 %)",)
    assert [x.details["weight_sqnr_rows"] for x in outcome.layers] == [32, 32]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["up.weight"][40, 3] = torch.nan
    save_file(tensors, tmp_path / "broken.safetensors")
    broken = prune().apply(open_checkpoint(tmp_path / "broken.safetensors"), ANY, {}).carrier
    with pytest.raises(ModelError, match="layer 'up': its weight holds values that are NaN"):
        broken.tensors()["up.weight"].read()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = carrier(module, TensorSpec("x", ("batch", 8), "float32"))
    with torch.no_grad():
        module[0].weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match="layer '0': its weight holds values that are NaN"):
        prune().apply(model, ANY, {})


def test_a_weight_that_is_summed_along_two_axes_is_kept():
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8, bias=False)
            self.last = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) @ self.first.weight)

    model = carrier(Turned(), TensorSpec("x", ("batch", 8), "float32"))
    assert "along different axes" in reasons(prune(), model)["first"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_type_and_values(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"fc.weight": tensor}, tmp_path / "half.safetensors")
    after = prune().apply(open_checkpoint(tmp_path / "half.safetensors"), ANY, {}).carrier
    found = after.tensors()["fc.weight"].read()
    assert found.dtype == dtype
    assert bool((found.reshape(-1, 4).count_nonzero(dim=1) == 2).all())
    assert torch.equal(found[found != 0], tensor[found != 0])
