"""Planning: what it finds before heavy work, and what it predicts."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.carriers import torch_carrier
from compressor.errors import CompressorError, DataError, ModelError, SpecError
from compressor.plan import make_plan
from compressor.report.plan_text import plan_text
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import (
    CHECKPOINT,
    ONNX,
    SIDE,
    Project,
    sample_images,
    tiny_onnx,
    torch_project,
)

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "plan_digits.txt"
STATIC = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
}


def refusal(project: Project, kind: type[CompressorError] = SpecError) -> str:
    with pytest.raises(kind) as caught:
        project.plan()
    assert not project.output.exists()
    return str(caught.value).replace(str(project.folder), "FOLDER")


def line_of(project: Project, text: str) -> str:
    """Return ``file:line`` of the first line of the spec that holds a text."""
    lines = project.path.read_text(encoding="utf-8").splitlines()
    return f"FOLDER/spec.yaml:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_the_plan_of_the_sample_is_as_agreed(spine: None):
    text = plan_text(make_plan(load_spec(ROOT / "samples/digits/spec.yaml")))
    fresh = GOLDEN.with_suffix(".new")
    if text != GOLDEN.read_text(encoding="utf-8"):
        fresh.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), f"if it is meant, rename {fresh.name}"
    fresh.unlink(missing_ok=True)


def test_counts(on_onnx: Project):
    plan = on_onnx.plan()
    assert plan.parameters == 72 + 8 + 576 + 8 + 32 + 4
    assert plan.bytes == 4 * plan.parameters
    assert plan.macs == 64 * (72 + 576) + 32
    assert [(r.name, r.kind, r.bytes_before, r.actions) for r in plan.rows] == [
        ("conv1", "Conv", 4 * (72 + 8), ()),
        ("conv2", "Conv", 4 * (576 + 8), ()),
        ("fc", "Gemm", 4 * (32 + 4), ()),
    ]
    assert not on_onnx.output.exists()


def test_each_pass_sees_the_model_as_the_one_before_leaves_it(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "fuse"}, STATIC]
    plan = on_onnx.plan()
    fuse, static = plan.passes
    assert static.bytes < fuse.bytes <= plan.bytes
    # Codes, scales and zero points: conv1 72 + 8 * 4, its int32 bias 8 * 4 with its scale ...
    assert all(row.bytes_after < row.bytes_before for row in plan.rows if row.name != "conv1")
    assert len(static.requests) >= 3
    assert len(plan.rows[0].actions) == 2


def test_memory_depends_on_the_batch_and_not_on_the_number_of_samples(on_onnx: Project):
    on_onnx.spec["passes"] = [STATIC]
    before = on_onnx.plan()
    assert before.peak_memory == on_onnx.plan("data.calibration.samples=3").peak_memory
    assert before.peak_memory == on_onnx.plan().peak_memory
    larger = on_onnx.plan("data.calibration.batch=48").peak_memory
    # One batch of each observed tensor, held twice: 32 more samples of them.
    grown = (larger - before.peak_memory) / (2 * 4 * 32)
    assert grown >= 64 + 8 * 64 + 8 * 64
    assert grown == int(grown)


def test_weights_are_not_read(on_torch: Project, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    read = torch_carrier.read_weights

    def watch(path: Path, *, headers_only: bool = False) -> dict[str, torch.Tensor]:
        asked.append(headers_only)
        return read(path, headers_only=headers_only)

    monkeypatch.setattr(torch_carrier, "read_weights", watch)
    on_torch.spec["passes"] = [{"pass": "fuse"}, STATIC]
    plan = on_torch.plan()
    assert asked == [True]
    # The plan's model has the factory's own weights still, whatever the file holds.
    assert plan.model.checkpoint == on_torch.folder / CHECKPOINT


def test_a_checkpoint_of_nan_passes_the_plan_and_fails_the_run(tmp_path: Path, spine: None):
    project = torch_project(tmp_path / "project", ".safetensors")
    checkpoint = project.folder / "tiny.safetensors"
    tensors = load_file(checkpoint)
    tensors["conv2.weight"][3, 1] = torch.nan
    tensors["conv2.bias"][0] = torch.inf
    save_file(tensors, checkpoint)
    project.spec["passes"] = [{"pass": "fuse"}]
    assert project.plan().parameters == 72 + 16 + 576 + 8 + 32 + 4
    with pytest.raises(ModelError) as caught:
        project.run()
    message = str(caught.value).replace(str(project.folder), "FOLDER")
    # Tensors of a safetensors file come in the order of their names.
    assert message == (
        f"{line_of(project, 'tiny.safetensors')}: checkpoint 'FOLDER/tiny.safetensors': "
        "tensor 'conv2.bias' holds 1 values that are NaN or infinite; "
        "the training diverged or the file is damaged; use an earlier checkpoint"
    )
    assert project.leftovers() == []


def test_a_rule_that_matches_no_layer(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "fuse"}, {**STATIC, "layers": [{"match": "conv3"}]}]
    opened = line_of(on_onnx, '"pass": "fuse"')
    message = refusal(on_onnx)
    assert message.endswith(": layer rule 'conv3': matches no layer; did you mean 'conv2'?")
    assert int(message.split(":")[1]) == int(opened.split(":")[1]) + 2  # where the next one starts


def test_training_after_a_graph_pass(on_torch: Project):
    on_torch.spec["passes"] = [{"pass": "learn"}, {"pass": "fuse"}]
    assert [p.name for p in on_torch.plan().passes] == ["learn", "fuse"]
    on_torch.spec["passes"].reverse()
    message = refusal(on_torch)
    assert message.endswith(
        ": pass 'learn': needs train; at this point the model offers graph, run, weights only; "
        "move it before the passes that work on the graph, or give model.factory"
    )


def test_training_an_onnx_file(on_onnx: Project):
    on_onnx.spec["passes"] = [{"pass": "learn"}]
    assert "pass 'learn': needs train; " in refusal(on_onnx)


def test_statistics_without_calibration_data(on_onnx: Project):
    on_onnx.spec["passes"] = [STATIC]
    del on_onnx.spec["data"]["calibration"]
    assert ": pass 'quantize-static': needs statistics of " in (message := refusal(on_onnx))
    assert message.endswith("there is no calibration data; add data.calibration")


def test_a_metric_limit_without_evaluation_data(on_onnx: Project):
    del on_onnx.spec["data"]["evaluation"]
    on_onnx.spec["limits"]["metric-drop"] = 1.0
    assert refusal(on_onnx) == (
        f"{line_of(on_onnx, 'metric-drop')}: limits.metric-drop: cannot be judged without "
        "data.evaluation; add data.evaluation, or remove the limit"
    )
    on_onnx.spec["limits"]["metric-drop"] = None
    assert on_onnx.plan().metric is None


def test_two_exports_that_would_write_the_same_file(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "onnx"}, {"format": "onnx", "opset": 18}]
    message = refusal(on_onnx)
    assert ": exports.1: is a second 'onnx'; both would write the same file; " in message


def test_a_bare_checkpoint_wants_safetensors(on_torch: Project):
    on_torch.spec["model"] = {"checkpoint": CHECKPOINT}
    assert refusal(on_torch).startswith(
        f"{line_of(on_torch, CHECKPOINT)}: checkpoint 'FOLDER/tiny.pt': is not a .safetensors file"
    )


@pytest.fixture
def on_checkpoint(tmp_path: Path) -> Project:
    project = torch_project(tmp_path, ".safetensors")
    project.spec["model"] = {"checkpoint": "tiny.safetensors"}
    step = {"pass": "quantize-weights", "bits": 8, "layers": [{"match": "conv*", "skip": True}]}
    project.spec["passes"] = [step]
    project.spec["exports"] = [{"format": "safetensors"}]
    return project


def test_a_bare_checkpoint_cannot_be_run_on_data(on_checkpoint: Project):
    message = refusal(on_checkpoint)
    assert ": data.calibration: is of no use: a bare checkpoint has no graph" in message
    assert "give model.factory" in message


@pytest.mark.parametrize(
    ("step", "lacking"),
    [
        ({"pass": "quantize-static"}, "graph and run"),
        ({"pass": "fuse"}, "graph"),
        ({"pass": "quantize-weights", "method": "gptq"}, "graph and run"),
    ],
)
def test_a_bare_checkpoint_offers_weights_only(
    on_checkpoint: Project, step: dict[str, str], lacking: str
):
    on_checkpoint.spec |= {"data": {}, "passes": [step]}
    assert refusal(on_checkpoint).endswith(
        f"pass '{step['pass']}': needs {lacking}; a bare checkpoint offers weights only; "
        "give model.factory"
    )


def test_a_plan_without_a_graph(on_checkpoint: Project):
    on_checkpoint.spec["data"] = {}
    plan = on_checkpoint.plan()
    assert plan.macs is None
    assert [(row.name, row.actions[0]) for row in plan.rows][-1] == ("fc", "int8/channel")
    fc = plan.rows[-1]
    assert (fc.bytes_before, fc.bytes_after) == (4 * 8 * 4, 4 * 8 + 4 * 4)
    assert plan.exports[0].bytes > sum(row.bytes_after for row in plan.rows)
    assert "MACs" not in plan_text(plan)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"image": {"shape": ["n", 3, SIDE, SIDE]}},
            "model.inputs.image: says image float32[n, 3, 8, 8], "
            "the ONNX file has image float32[batch, 1, 8, 8]; ",
        ),
        (
            {"image": {"shape": ["n", 1, SIDE]}},
            "model.inputs.image: says image float32[n, 1, 8], ",
        ),
        (
            {"image": {"shape": ["n", 1, SIDE, SIDE], "dtype": "uint8"}},
            "model.inputs.image: says image uint8[n, 1, 8, 8], ",
        ),
        (
            {"picture": {"shape": ["n", 1, SIDE, SIDE]}},
            "model.inputs.picture: is not an input of the ONNX file; it has image",
        ),
    ],
)
def test_inputs_that_an_onnx_file_does_not_have(
    on_onnx: Project, inputs: dict[str, Any], message: str
):
    on_onnx.spec["model"]["inputs"] = inputs
    name = next(iter(inputs))
    assert refusal(on_onnx).startswith(f"{line_of(on_onnx, f'{name}')}: {message}")


def test_inputs_that_an_onnx_file_has(on_onnx: Project):
    on_onnx.spec["model"]["inputs"] = {"image": {"shape": [4, 1, "h", "w"]}}
    (own,) = on_onnx.plan().model.carrier.inputs
    assert str(own) == "image float32[batch, 1, 8, 8]"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "model.inputs: is empty, a module does not know its own inputs; write e.g. "),
        (
            {"image": {"shape": ["n", 1, 8, 8]}, "mask": {"shape": ["n"]}},
            "model.inputs: names 2 inputs, forward of TinyNet takes 1; its parameters are image",
        ),
        (
            {"image": {"shape": ["n", 3, 8, 8]}},
            "module TinyNet: cannot be lowered to a graph (RuntimeError: Given groups=1, ",
        ),
    ],
)
def test_inputs_that_a_module_does_not_take(
    on_torch: Project, inputs: dict[str, Any], message: str
):
    on_torch.spec["model"]["inputs"] = inputs
    assert message in refusal(on_torch, CompressorError)


def save(project: Project, **arrays: np.ndarray) -> None:
    np.savez(project.folder / "test.npz", **arrays)


LABELS = np.zeros(48, np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"image": sample_images(1)[:, :, :4], "label": LABELS},
            "evaluation data, input 'image': shape is [1, 1, 4, 8], the model wants "
            "image float32[batch, 1, 8, 8]; convert it in a transform",
        ),
        (
            {"image": sample_images(1)[:, 0], "label": LABELS},
            "evaluation data, input 'image': shape is [1, 8, 8], ",
        ),
        (
            {"image": sample_images(1).astype(np.float64), "label": LABELS},
            "evaluation data, input 'image': dtype is float64, the model wants float32; ",
        ),
        (
            {"image": sample_images(1)[:0], "label": LABELS[:0]},
            "data 'FOLDER/test.npz': array 'image' is empty, ",
        ),
        (
            {"picture": sample_images(1), "label": LABELS},
            "data 'FOLDER/test.npz': has no array 'image'; ",
        ),
        (
            {"image": sample_images(1), "lable": LABELS},
            "data 'FOLDER/test.npz': has no array 'label'; did you mean 'lable'? ",
        ),
        (
            {"image": sample_images(1), "label": LABELS[:40]},
            "data 'FOLDER/test.npz': its arrays have different lengths: ",
        ),
    ],
)
def test_data_that_do_not_fit(on_onnx: Project, arrays: dict[str, np.ndarray], message: str):
    save(on_onnx, **arrays)
    found = refusal(on_onnx, DataError)
    assert found.startswith(f"{line_of(on_onnx, 'test.npz')}: {message}")


def test_an_input_without_data(on_onnx: Project):
    on_onnx.spec["data"]["calibration"]["inputs"] = {"img": "image"}
    assert refusal(on_onnx, DataError) == (
        f"{line_of(on_onnx, 'calib.npz')}: calibration data: has no array for the model's input "
        "'image'; map it under inputs: did you mean 'img'?"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(batch): return batch['x']", "transform 'tiny_data:f': raised KeyError: 'x'; "),
        ("def f(batch): return None", "transform 'tiny_data:f': returned a NoneType; "),
        (
            "def f(batch): return {'image': batch['image']}",
            "evaluation data: has no target 'label' after its transform; let the transform pass",
        ),
        (
            "def f(batch): return {**batch, 'image': batch['image'][:, :, 1:]}",
            "evaluation data, input 'image': shape is [1, 1, 7, 8], ",
        ),
        ("def g(batch): pass", "data.evaluation.transform: 'tiny_data' has no 'f'; there is: g"),
        ("f = 3", "data.evaluation.transform: 'tiny_data:f' is a int; name a function"),
    ],
)
def test_transforms_that_go_wrong(on_onnx: Project, source: str, message: str):
    (on_onnx.folder / "tiny_data.py").write_text(source)
    on_onnx.spec["data"]["evaluation"]["transform"] = "tiny_data:f"
    found = refusal(on_onnx, CompressorError)
    assert found.startswith(f"{line_of(on_onnx, 'test.npz')}: {message}")


def fixed_batch(project: Project, batch: int) -> None:
    onnx.save(tiny_onnx(batch=4), project.folder / ONNX)
    for entry in project.spec["data"].values():
        entry["batch"] = batch


def test_a_fixed_batch_is_the_default(on_onnx: Project):
    fixed_batch(on_onnx, 16)
    for entry in on_onnx.spec["data"].values():
        del entry["batch"]
    plan = on_onnx.plan()
    assert {data.batch for data in plan.data.values()} == {4}


def test_a_model_with_a_fixed_batch(on_onnx: Project):
    fixed_batch(on_onnx, 16)
    assert refusal(on_onnx) == (
        f"{line_of(on_onnx, 'calib.npz')}: data.calibration.batch: is 16, and the model takes "
        "4 samples at a time; set batch: 4"
    )
    fixed_batch(on_onnx, 4)
    on_onnx.spec["data"]["evaluation"]["samples"] = 46
    assert refusal(on_onnx) == (
        f"{line_of(on_onnx, 'test.npz')}: evaluation data: has 46 samples, and the model takes "
        "4 at a time; set samples: 44"
    )
    on_onnx.spec["data"]["evaluation"]["samples"] = 44
    result = on_onnx.run()
    assert result.report["baseline"]["metric"]["samples"] == 44
    assert [row["batch"] for row in result.report["artifacts"][0]["latency"]] == [4]


@pytest.mark.parametrize(
    "passes",
    [
        [],
        [STATIC],
        [{"pass": "quantize-dynamic"}],
        [{"pass": "cast", "weights-only": True}],
        [{"pass": "fuse"}, {**STATIC, "layers": [{"match": "conv1", "skip": True}]}],
    ],
    ids=lambda passes: "+".join(p["pass"] for p in passes) or "none",
)
def test_predicted_bytes_are_those_that_are_written(on_onnx: Project, passes: list[dict[str, Any]]):
    on_onnx.spec["passes"] = passes
    on_onnx.spec["exports"] = [{"format": "onnx", "opset": 20}, {"format": "safetensors"}]
    predicted = {e.format: e.bytes for e in on_onnx.plan().exports}
    for artifact in on_onnx.run().report["artifacts"]:
        on_disk = sum((on_onnx.output / f["name"]).stat().st_size for f in artifact["files"])
        assert artifact["bytes"] == on_disk
        assert artifact["predicted_bytes"] == predicted[artifact["format"]]
        assert on_disk == pytest.approx(predicted[artifact["format"]], rel=0.03)
