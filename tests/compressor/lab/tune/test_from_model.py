"""``compress tune MODEL --data``: no spec and no labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from compressor.cli.application import application
from compressor.errors import SpecError
from compressor.lab.tune import structure
from compressor.lab.tune.from_model import spec_of_model
from compressor.lab.tune.recipe import REMEDIES
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import ONNX, Project, sample_images


def tuned(*arguments: object) -> Result:
    return CliRunner().invoke(application, ["tune", *map(str, arguments)])


@pytest.fixture
def model(on_onnx: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network with scores for four classes, and samples under a name of their own."""
    monkeypatch.setitem(REMEDIES, "quantize-static", ())
    monkeypatch.setattr(structure, "_SHARES", ())  # test_structure.py has them
    np.savez(on_onnx.folder / "typical.npz", pictures=sample_images(2, 256))
    monkeypatch.chdir(on_onnx.folder)
    return on_onnx.folder / ONNX


def test_a_model_and_samples_suffice_and_a_run_gives_the_same_bytes(model: Path):
    result = tuned(
        *(model, "--data", "typical.npz", "--max-size-ratio", "0.98", "--rounds", "1"),
        *("-o", model.parent / "mine.yaml"),
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads((model.parent / "mine.json").read_text())
    assert document["metric"] == "agreement"
    assert document["search"] == "samples that neither calibrate nor judge"
    point = next(p for p in document["points"] if p["name"] == document["chosen"])
    within = [p for p in document["points"] if p["size_ratio"] <= 0.98]
    assert point["sqnr_db"] == max(p["sqnr_db"] for p in within)
    assert point["drop"] is not None
    output = model.parent / "out" / "tiny-mine"
    proved = (output / "model.onnx").read_bytes()
    assert len(proved) == point["bytes"]
    again = CliRunner().invoke(application, ["run", str(model.parent / "mine.yaml")])
    assert again.exit_code == 0, again.stderr
    assert (output / "model.onnx").read_bytes() == proved


def test_quiet_prints_one_line_where_there_is_no_answer(model: Path):
    """As `run` does; tune had no such option."""
    options = ("--data", "typical.npz", "--max-size-ratio", "0.001", "--rounds", "0")
    refused = tuned(model, *options, "-q")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith("tiny: ")


def test_numbers_are_not_judged_by_the_largest(model: Path):
    """The data hold right answers that are floats in the form of the output."""
    samples = {"pictures": sample_images(2, 256), "numbers": np.zeros((256, 4), np.float32)}
    np.savez(model.parent / "typical.npz", **samples)
    spec = spec_of_model(model, Path("typical.npz"), None, model.parent)
    assert spec.resolved["metric"] == "cosine"


def test_what_calibrates_searches_and_judges_shares_no_sample(model: Path):
    spec = spec_of_model(model, Path("typical.npz"), None, model.parent)
    folds = {role: entry.keys.fold for role, entry in spec.data.items()}
    assert folds == {"calibration": "2/4", "search": "4/4", "evaluation": "1/2"}
    assert {tuple(e.keys.inputs.items()) for e in spec.data.values()} == {(("image", "pictures"),)}
    assert all(entry.keys.target is None for entry in spec.data.values())


def test_a_fixed_batch_is_filled(model: Path):
    proto = onnx.load(model)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 24
    onnx.save(proto, model)
    spec = spec_of_model(model, Path("typical.npz"), None, model.parent)
    counts = {role: (e.keys.samples, e.keys.batch) for role, e in spec.data.items()}
    assert counts == {"calibration": (48, 24), "search": (48, 24), "evaluation": (120, 24)}


def test_folders_apart_are_used_as_they_are_and_their_labels_are_not(model: Path):
    for role in ("calibration", "evaluation"):
        for name in ("a", "b"):
            (model.parent / "data" / role / name).mkdir(parents=True)
            for number in range(2):
                place = model.parent / "data" / role / name / f"{number}.png"
                Image.new("L", (8, 8), number).save(place)
    spec = spec_of_model(model, Path("data"), "cosine", model.parent)
    found = {r: (e.options.path.name, e.keys.fold) for r, e in spec.data.items() if e.options}  # type: ignore[attr-defined]
    assert found == {
        "calibration": ("calibration", "1/2"),
        "search": ("calibration", "2/2"),
        "evaluation": ("evaluation", None),
    }
    assert spec.metric == "cosine"
    assert spec.data["evaluation"].keys.target is None


def test_lists_of_all_samples_are_told_apart_by_one_sample_at_a_time(model: Path):
    """The metric refused them after calibration, and named one that only a spec can set."""
    proto = onnx.load(model)
    scores = proto.graph.output[0]
    scores.name = "boxes"
    scores.type.tensor_type.shape.dim[0].dim_param = "found"
    last = proto.graph.node[-1].output[0]
    axis = onnx.numpy_helper.from_array(np.array([-1]), "flat")
    zero = onnx.numpy_helper.from_array(np.array([0]), "zero")
    proto.graph.initializer.extend([axis, zero])
    made = [
        ("Gather", [last, "zero"], "column", {"axis": 1}),
        ("Reshape", ["column", "flat"], "first", {}),
        ("Greater", ["first", "first_mean"], "kept", {}),
        ("Compress", [last, "kept"], "boxes", {"axis": 0}),
    ]
    mean = onnx.helper.make_node("ReduceMean", ["first"], ["first_mean"], keepdims=0)
    nodes = [onnx.helper.make_node(n, i, [o], **keys) for n, i, o, keys in made]
    proto.graph.node.extend([*nodes[:2], mean, *nodes[2:]])
    onnx.save(proto, model)
    spec = spec_of_model(model, Path("typical.npz"), None, model.parent)
    assert {entry.keys.batch for entry in spec.data.values()} == {1}
    assert spec.metric == "cosine"


def test_an_open_axis_of_samples_by_another_name_is_still_one(model: Path):
    proto = onnx.load(model)
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "other"
    onnx.save(proto, model)
    spec = spec_of_model(model, Path("typical.npz"), None, model.parent)
    assert all(entry.keys.batch != 1 for entry in spec.data.values())


def test_what_needs_a_spec_says_so(model: Path):
    (model.parent / "net.pt").write_bytes((model.parent / ONNX).read_bytes())
    with pytest.raises(SpecError, match="is given without data"):
        spec_of_model(model, None, None, model.parent)
    for arguments, words in (
        (("missing.onnx", "--data", "typical.npz"), "does not exist"),
        ((model, "--data", "typical.npz", "--set", "seed=1"), "option --set: is given with a mod"),
        (("spec.yaml", "--data", "typical.npz"), "option --data: is given with a spec"),
        (
            (model, "--data", "typical.npz", "--metric", "accuracy"),
            "needs labels, and a model without a spec is judged without",
        ),
    ):
        result = tuned(*arguments, "--max-size-ratio", "0.5")
        assert result.exit_code == 2
        assert words in result.stderr


def test_search_data_of_class_folders_are_of_all_classes(on_onnx: Project):
    from compressor.lab.tune.search_data import search_data
    from compressor.run.plan import make_plan

    for label, name in enumerate("abcd"):
        (on_onnx.folder / "images" / name).mkdir(parents=True)
        for number in range(20):
            place = on_onnx.folder / "images" / name / f"{number:02}.png"
            Image.new("L", (8, 8), 20 * label + number).save(place)
    on_onnx.spec["data"]["calibration"] = {
        "images": "images",
        "size": [8, 8],
        "colour": "grey",
        "layout": "channels-first",
        "mean": 0,
        "std": 1,
        "inputs": {"image": "image"},
        "batch": 8,
        "samples": 64,
    }
    plan = make_plan(load_spec(on_onnx.path))
    found = search_data(plan)
    assert found.words == "40 files of the calibration source, which do not calibrate"
    assert found.calibration == {"fold": "1/2", "samples": 40}
    values = {
        round(float(v) * 255)
        for p in found.parts
        for b in p.batches()
        for v in b["image"].max((1, 2, 3))
    }
    assert values == set(range(1, 80, 2))


def test_errors_on_data_name_the_model_and_the_spec_that_could_help(model: Path):
    np.savez("large.npz", pictures=np.zeros((64, 1, 9, 9), np.float32))
    result = tuned(ONNX, "--data", "large.npz", "--max-metric-drop", "1", "-o", "mine.yaml")
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {ONNX}: calibration data, input 'image': shape is [1,")
    remedy = f"convert it in a transform, in a spec (compress init {ONNX})"
    assert result.stderr.strip().endswith(remedy)
