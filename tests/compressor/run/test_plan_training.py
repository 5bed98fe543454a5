"""What planning says of passes that train, and of what their options name."""

import re
import shutil
from typing import Any

import onnx
import pytest

from compressor.errors import ModelError
from tests.compressor.run.plan_refusals import line_of, refusal
from tests.compressor.tiny_project import CHECKPOINT, Project, torch_project

TRAINING = {"npz": "test.npz", "inputs": {"image": "image"}, "target": "label"}


def drilled(project: Project, **options: Any) -> Project:
    project.spec["passes"] = [{"pass": "drill", **options}]
    project.spec["data"]["training"] = dict(TRAINING)
    return project


def place(project: Project) -> str:
    """Return ``file:line`` of the only pass."""
    file, _, line = line_of(project, '"drill"').rpartition(":")
    return f"{file}:{int(line) - 1}"  # where its mapping starts


def test_a_pass_that_trains_is_known(on_onnx: Project):
    (planned,) = drilled(on_onnx).plan().passes
    assert planned.trains
    assert not planned.reads_data
    assert drilled(on_onnx, calibrates=True).plan().passes[0].reads_data


def test_no_training_data(on_onnx: Project):
    del drilled(on_onnx).spec["data"]["training"]
    assert refusal(on_onnx) == (
        f"{place(on_onnx)}: pass 'drill': trains, and there is no training data; add data.training"
    )


def test_no_target(on_onnx: Project):
    del drilled(on_onnx).spec["data"]["training"]["target"]
    assert refusal(on_onnx) == (
        f"{place(on_onnx)}: pass 'drill': needs the right answers, and "
        "data.training has no target; add target to data.training"
    )
    drilled(on_onnx, labels=False)
    del on_onnx.spec["data"]["training"]["target"]
    assert on_onnx.plan().passes[0].trains


def test_a_search_needs_data_of_its_own(on_torch: Project):
    on_torch.spec["passes"] = [{"pass": "archive"}]
    data = on_torch.spec["data"]
    data["training"] = dict(TRAINING)
    problem = "pass 'archive': chooses among what it has trained, and there is no search data"
    assert problem in refusal(on_torch)
    data["search"] = {"npz": "test.npz", "inputs": {"image": "image"}}
    assert "data.search has no target; add target to data.search" in refusal(on_torch)
    data["search"] = dict(TRAINING)
    (planned,) = on_torch.plan().passes
    assert planned.trains
    assert on_torch.plan().spec.resolved["data"]["search"]["target"] == "label"


def test_the_metric_of_a_training_is_the_spec_s(on_onnx: Project):
    drilled(on_onnx).spec["metric"] = "top5"
    plan = on_onnx.plan()
    assert plan.training_metric is plan.metric
    assert plan.context.metric == "top5"
    del on_onnx.spec["data"]["evaluation"]
    plan = on_onnx.plan()
    assert plan.metric is None
    assert plan.context.metric == "top5"
    on_onnx.spec["data"]["training"] = {"npz": "calib.npz"}
    on_onnx.spec["passes"] = []
    assert on_onnx.plan().training_metric is None


def test_a_function_that_is_not_there(on_onnx: Project):
    (on_onnx.folder / "tiny_data.py").write_text("def lost(): return 1\n")
    found = refusal(drilled(on_onnx, loss="tiny_data:loss"))
    problem = "'tiny_data' has no 'loss'; did you mean 'lost'?"
    assert found == f"{place(on_onnx)}: pass 'drill': {problem}"


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"onnx": "x.onnx"}, "'FOLDER/x.onnx'"),
        ({"onnx": "$NOWHERE_TO_BE_SEEN/x.onnx"}, "passes.0.teacher.onnx: uses the environment"),
        (
            {"onnx": "tiny.onnx", "inputs": {"pixels": {"shape": [1]}}},
            "passes.0.teacher.inputs.pixels: is not an input",
        ),
        ({"factory": "tiny_net:nothing"}, "passes.0.teacher.factory: 'tiny_net' does not import"),
        ({"factori": "tiny_net:build"}, "passes.0.teacher.factori: is not a known key"),
        ({}, "passes.0.teacher: is {}; set onnx, or factory"),
    ],
)
def test_a_teacher_that_cannot_be_opened(on_onnx: Project, teacher: dict[str, Any], message: str):
    found = refusal(drilled(on_onnx, teacher=teacher))
    assert message in found
    assert "FOLDER/spec.yaml:" in found


def test_a_bare_checkpoint_teaches_nothing(on_onnx: Project, tmp_path):
    other = torch_project(tmp_path / "other", ".safetensors")
    shutil.copy(other.folder / "tiny.safetensors", on_onnx.folder)
    found = refusal(drilled(on_onnx, teacher={"checkpoint": "tiny.safetensors"}))
    assert "passes.0.teacher: cannot be used: a bare checkpoint has no graph" in found


def test_a_teacher_is_compared_with_the_model(on_onnx: Project):
    teacher = onnx.load(on_onnx.folder / "tiny.onnx")
    teacher.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    for array in teacher.graph.initializer:
        if array.name.startswith("fc"):
            values = onnx.numpy_helper.to_array(array)[:3]
            array.CopyFrom(onnx.numpy_helper.from_array(values, array.name))
    teacher.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3
    onnx.save(teacher, on_onnx.folder / "teacher.onnx")
    found = refusal(drilled(on_onnx, teacher={"onnx": "teacher.onnx"}))
    assert "teacher: has 3 outputs, not 4" in found


def test_a_teacher_s_checkpoint_must_fit_its_factory(on_torch: Project):
    teacher = {"factory": "tiny_net:build", "config": {"width": 6}, "checkpoint": CHECKPOINT}
    found = refusal(drilled(on_torch, teacher=teacher), ModelError)
    lines = on_torch.path.read_text().splitlines()
    _, line = (n for n, text in enumerate(lines, 1) if CHECKPOINT in text)
    assert found.startswith(f"FOLDER/spec.yaml:{line}: checkpoint 'FOLDER/tiny.pt': has 'conv1")


CPU = re.compile(r"(\d\.\d\d) x on CPUs with VNNI")


def predicted(project: Project, target: float, name: str) -> list[float]:
    """Return the predicted latencies that a pass has behind one that prunes; first all integers."""
    project.spec["passes"] = [{"pass": name}]
    if target < 1:
        project.spec["passes"].insert(0, {"pass": "prune-structured", "target": {"ratio": target}})
    project.spec["data"]["training"] = dict(TRAINING)
    project.spec["exports"] = [{"format": "onnx", "target": "ort-cpu"}]
    (note,) = (note for note in project.plan().passes[-1].notes if "predicted latency" in note)
    assert "predicted latency in ONNX Runtime over the float model's: " in note
    found = [float(ratio) for ratio in CPU.findall(note)]
    return found if name == "qat" else found[::-1]


@pytest.mark.parametrize("name", ["qat", "quantize-static"])
def test_predicted_latency_counts_what_was_pruned_before(on_torch: Project, name: str):
    _, floats = predicted(on_torch, 1, name)
    assert floats == 1
    on_torch.spec["model"]["config"] = {"width": 32}
    del on_torch.spec["model"]["checkpoint"]
    integers, floats = predicted(on_torch, 0.75, name)
    assert floats < 0.7
    assert integers < 1.1
