"""Starter specs of models whose data lie beside them, or are named: they pass the plan."""

from __future__ import annotations

import json
import sys
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image
from safetensors.numpy import save_file

from compressor.errors import DataError, SpecError
from compressor.lab.found_data import beside, look_at
from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices, Question, questions
from compressor.run.plan import Plan, make_plan
from compressor.spec.load import load_spec


def save_net(path: Path, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> Path:
    """Write a network that casts, flattens by a mean over all but the first axis, and scores."""
    entry = helper.make_tensor_value_info("x", dtype, shape)
    output = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [shape[0], 40])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1, 40], np.arange(40.0).tolist())
    axes = helper.make_tensor("axes", TensorProto.INT64, [len(shape) - 1], range(1, len(shape)))
    rows = helper.make_tensor("rows", TensorProto.INT64, [2], [-1, 1])
    nodes = [
        helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float", "axes"], ["mean"], keepdims=0),
        helper.make_node("Reshape", ["mean", "rows"], ["row"]),
        helper.make_node("MatMul", ["row", "w"], ["scores"]),
    ]
    graph = helper.make_graph(nodes, "g", [entry], [output], [weight, axes, rows])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, path)
    return path


def paint(folder: Path, classes: Sequence[str] = ("ant", "bee"), count: int = 3) -> Path:
    for level, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (9, 7), (50 * level, 9, index)).save(folder / name / f"{index}.png")
    return folder


def sing(folder: Path) -> Path:
    for name in ("no", "yes"):
        (folder / name).mkdir(parents=True)
        with wave.open(str(folder / name / "a.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(bytes(400))
    return folder


def planned(model: Path, choices: Choices = Choices()) -> Plan:  # noqa: B008  # frozen
    spec = model.parent / "specs" / "spec.yaml"
    sys.modules.pop("spec_data", None)  # the code of an earlier test
    write_starter(model, spec, choices)
    return make_plan(load_spec(spec))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (("batch", 3, 8, 10), TensorProto.FLOAT),
        (("batch", 8, 10, 1), TensorProto.FLOAT),
        (("batch", 8, 10, 3), TensorProto.UINT8),
        (("batch", 1, 8, 10), TensorProto.UINT8),
        (("batch", 3, "h", "w"), TensorProto.FLOAT),
        ((2, 3, 8, 10), TensorProto.FLOAT),
    ],
)
def test_class_folders_beside_the_model_are_its_data(tmp_path, shape, dtype):
    paint(tmp_path / "photos")
    plan = planned(save_net(tmp_path / "m.onnx", shape, dtype))
    data = plan.data["evaluation"]
    count = 2 if shape[0] == 2 else 3  # whole batches of half of the images
    assert (data.samples, data.target, plan.metric.name) == (count, "label", "accuracy")
    batch = data.first(count)
    sides = [n if isinstance(n, int) else 224 for n in shape[1:]]
    assert list(batch["x"].shape[1:]) == sides
    assert batch["label"].tolist() == [0, 1, 1][:count]  # the second of every two
    assert plan.data["calibration"].samples == count
    assert not any("flatters" in warning for warning in plan.warnings)


def test_parts_for_ranges_and_for_judging_are_told_apart(tmp_path):
    paint(tmp_path / "photos" / "train", count=4)
    paint(tmp_path / "photos" / "val", count=2)
    found = look_at(tmp_path / "photos")
    assert (found.calibration.name, found.evaluation.name) == ("train", "val")
    assert found.words() == "4 images in 2 classes"
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8)))
    assert {role: data.samples for role, data in plan.data.items()} == {
        "calibration": 8,
        "evaluation": 4,
    }
    assert "CHECK: take others" not in (tmp_path / "specs" / "spec.yaml").read_text()


def test_the_models_own_file_says_how_images_are_prepared(tmp_path):
    paint(tmp_path / "photos")
    value = {"image_processor_type": "ViTImageProcessor", "size": 8}
    value |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value))
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8)))
    assert "preprocessor_config.json has it" in plan.data["evaluation"].preparation
    assert "CHECK: as in training" not in (tmp_path / "specs" / "spec.yaml").read_text()


def test_sounds(tmp_path):
    sing(tmp_path / "commands")
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 300)))
    assert plan.data["evaluation"].first(1)["x"].shape == (1, 300)
    (tmp_path / "specs" / "spec.yaml").unlink()
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", "length")))
    assert plan.data["evaluation"].first(1)["x"].shape == (1, 200)  # as long as the first
    assert "8,000 samples a second" in plan.data["evaluation"].preparation
    (tmp_path / "specs" / "spec.yaml").unlink()
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 1, "length")))
    assert plan.data["evaluation"].first(1)["x"].shape == (1, 1, 200)  # an axis for channels


def test_choices_are_written(tmp_path):
    folder = paint(tmp_path / "elsewhere" / "photos")
    model = save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8))
    plan = planned(model, Choices(folder, "ort-cuda", "top5"))
    assert plan.metric.name == "top5"
    assert plan.context.targets == {"ort-cuda"}
    # Folders that may be anything are not taken unless they are named.
    assert beside(model) == []


def test_a_file_of_arrays(tmp_path):
    np.savez(tmp_path / "all.npz", x=np.zeros((4, 5), np.float32))
    model = save_net(tmp_path / "m.onnx", ("batch", 5))
    plan = planned(model, Choices(tmp_path / "all.npz", metric="cosine"))
    assert plan.data["calibration"].samples == plan.data["evaluation"].samples == 2
    assert not any("flatters" in warning for warning in plan.warnings)
    assert plan.metric.name == "cosine"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("mse", "# What is measured.\nmetric: mse\n"),
        ("agreement", "# top5, or your own package.module:function.\nmetric: agreement\n"),
    ],
)
def test_the_comment_is_about_the_metric_that_was_chosen(
    tmp_path: Path, metric: str, said: str
) -> None:
    np.savez(tmp_path / "all.npz", x=np.zeros((4, 5), np.float32))
    model = save_net(tmp_path / "m.onnx", ("batch", 5))
    planned(model, Choices(tmp_path / "all.npz", metric=metric))
    text = (tmp_path / "specs" / "spec.yaml").read_text()
    assert said in text
    assert text.count("# Without right answers") == (metric == "agreement")


def test_arrays_of_other_names_are_found_by_their_form(tmp_path):
    arrays = {"pixels": np.zeros((4, 5), np.float32), "label": np.zeros(4, np.int64)}
    np.savez(tmp_path / "all.npz", **arrays)
    model = save_net(tmp_path / "m.onnx", ("batch", 5))
    plan = planned(model, Choices(tmp_path / "all.npz"))
    assert plan.data["evaluation"].first(2)["x"].shape == (2, 5)
    np.savez(tmp_path / "two.npz", **arrays, other=np.ones((4, 5), np.float32))
    (tmp_path / "specs" / "spec.yaml").unlink()
    with pytest.raises(DataError, match="has no array 'x'"):  # which of them, nobody knows
        planned(model, Choices(tmp_path / "two.npz"))


PARTS = [("x_train", "y_train", "x_test", "y_test"), ("trainX", "trainY", "TestX", "TestLabels")]


@pytest.mark.parametrize("names", PARTS)
def test_a_file_of_both_parts(tmp_path, names):
    images, classes = np.ones((4, 5), np.float32), np.zeros(4, np.int64)
    np.savez(
        tmp_path / "all.npz", **dict(zip(names, (images, classes, -images, classes), strict=True))
    )
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 5)), Choices(tmp_path / "all.npz"))
    assert plan.metric.name == "accuracy"
    typical, judging = (plan.data[part].first(9) for part in ("calibration", "evaluation"))
    assert np.array_equal(typical["x"], images)
    assert np.array_equal(judging["x"], -images)
    assert "CHECK" not in (tmp_path / "specs" / "spec.yaml").read_text()


def test_the_only_array_is_the_inputs_whatever_its_type(tmp_path):
    arrays = {"train": np.zeros((4, 5), np.uint8), "test": np.ones((4, 5), np.uint8)}
    np.savez(tmp_path / "all.npz", **arrays)
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 5)), Choices(tmp_path / "all.npz"))
    assert plan.data["calibration"].first(1)["x"].max() == 0
    assert plan.data["evaluation"].first(1)["x"].min() > 0


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_file_of_one_array(tmp_path, kind):
    array = np.arange(20, dtype=np.float32).reshape(4, 5)
    path = tmp_path / f"typical.{kind}"
    np.save(path, array) if kind == "npy" else save_file({"pixels": array}, path)
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 5)), Choices(path))
    assert np.array_equal(plan.data["evaluation"].first(2)["x"], array[1::2])
    assert "FILL IN" not in (tmp_path / "specs" / "spec.yaml").read_text()


def test_images_of_any_size_that_a_file_holds_in_one_array(tmp_path):
    np.save(tmp_path / "pages.npy", np.zeros((4, 3, 6, 9), np.float32))
    model = save_net(tmp_path / "m.onnx", ("batch", 3, "h", "w"))
    plan = planned(model, Choices(tmp_path / "pages.npy"))
    assert plan.data["calibration"].samples == plan.data["evaluation"].samples == 2
    assert not plan.data["evaluation"].feeds


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "all.npz").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match=r"all\.npz.*cannot be read"):
        look_at(tmp_path / "all.npz")


def test_a_model_whose_answers_are_numbers_is_not_judged_by_the_largest(tmp_path):
    """init judged a forecast of twelve steps by which of them is the largest."""
    model = save_net(tmp_path / "m.onnx", ("batch", 5))
    arrays = {"x": np.zeros((4, 5), np.float32), "future": np.zeros((4, 40), np.float32)}
    np.savez(tmp_path / "all.npz", **arrays)
    assert planned(model, Choices(tmp_path / "all.npz")).metric.name == "cosine"
    text = (tmp_path / "specs" / "spec.yaml").read_text()
    assert "    # target: future # the array with the right answers\n" in text


@pytest.mark.parametrize("labels", [np.array([0, 1, 1, 0]), np.zeros(4, np.float32), None])
def test_a_model_that_scores_classes_is_judged_by_its_answers(tmp_path, labels):
    """They are compared with the right ones if these are there, else with the float model's."""
    arrays = {"x": np.zeros((4, 5), np.float32)} | ({} if labels is None else {"label": labels})
    np.savez(tmp_path / "all.npz", **arrays)
    model = save_net(tmp_path / "m.onnx", ("batch", 5))
    plan = planned(model, Choices(tmp_path / "all.npz"))
    known = labels is not None and labels.dtype.kind == "i"
    assert plan.metric.name == ("accuracy" if known else "agreement")


def two_outputs(path: Path) -> Path:
    """Write a network whose first output is not the scores, so that init leaves them alone."""
    model = onnx.load(save_net(path, ("batch", 5)))
    model.graph.output.insert(0, helper.make_tensor_value_info("row", TensorProto.FLOAT, None))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("name", ["y", "kind"])
@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_a_metric_that_needs_answers_gets_those_of_the_file(tmp_path, name, metric):
    """init wrote a spec without a target, which the next command refused."""
    arrays = {"x": np.zeros((4, 5), np.float32), name: np.array([0, 1, 1, 0])}
    np.savez(tmp_path / "all.npz", **arrays)
    plan = planned(two_outputs(tmp_path / "m.onnx"), Choices(tmp_path / "all.npz", metric=metric))
    assert plan.metric.name == metric
    expected = name if metric == "accuracy" or name == "y" else None
    assert plan.spec.data["evaluation"].keys.target == expected


def test_a_metric_of_numbers_is_given_no_classes(tmp_path):
    """The target of a classifier's folders and files was written for any metric."""
    np.savez(tmp_path / "all.npz", x=np.zeros((4, 5), np.float32), y=np.array([0, 1, 1, 0]))
    model = save_net(tmp_path / "m.onnx", ("batch", 5))
    assert planned(model, Choices(tmp_path / "all.npz", metric="mse")).metric.against_float


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_a_metric_that_needs_answers_is_refused_where_there_are_none(tmp_path, kind):
    shape = ("batch", 3, 8, 8) if kind == "folder" else ("batch", 5)
    model, data = save_net(tmp_path / "m.onnx", shape), tmp_path / "all.npz"
    if kind == "folder":
        data = paint(tmp_path / "photos", ("one",)) / "one"
    else:
        np.savez(data, x=np.zeros((4, 5), np.float32), a=np.ones((4, 1)), b=np.ones((4, 2)))
    with pytest.raises(SpecError, match="'accuracy': needs right answers, and none were seen in"):
        planned(model, Choices(data, metric="accuracy"))


@pytest.mark.parametrize("axes", [(4, "batch", 3), ("time", "batch", 3)])
@pytest.mark.parametrize("kind", ["images", "array"])
def test_samples_behind_another_axis_of_the_output_are_judged_one_by_one(tmp_path, kind, axes):
    """As by a recognizer of text, which gives ``[time, batch, classes]``."""
    if kind == "images":
        paint(tmp_path / "photos")
    else:
        values = np.random.default_rng(0).normal(size=(6, 3, 4, 4)).astype(np.float32)
        np.save(tmp_path / "pages.npy", values)
    value, make = helper.make_tensor_value_info, helper.make_node
    nodes = [
        make("ReduceMean", ["x"], ["m"], axes=[1], keepdims=0),
        make("Transpose", ["m"], ["t"], perm=[1, 0, 2]),
        make("MatMul", ["t", "w"], ["y"]),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.arange(12.0))
    inputs = [value("x", TensorProto.FLOAT, ["batch", 3, 4, 4])]
    outputs = [value("y", TensorProto.FLOAT, axes)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    place = tmp_path / ("photos" if kind == "images" else "pages.npy")
    plan = planned(tmp_path / "m.onnx", Choices(place))
    assert plan.data["evaluation"].batch == 1
    assert "judged alone" in (tmp_path / "specs" / "spec.yaml").read_text()


@pytest.mark.parametrize("parts", [("train", "test"), ()])
@pytest.mark.parametrize("shape", [("batch", 5), (3, 5)])
def test_a_folder_of_npz_files_holds_a_sample_in_each(tmp_path, shape, parts):
    for part in parts or ("",):
        (tmp_path / "feeds" / part).mkdir(parents=True)
        for index in range({"train": 3, "test": 2}.get(part, 5)):
            path = tmp_path / "feeds" / part / f"{index}.npz"
            np.savez(path, values=np.full((3, 5), index, np.float32), length=np.int64(3))
    plan = planned(save_net(tmp_path / "m.onnx", shape), Choices(tmp_path / "feeds"))
    counts = {role: data.samples for role, data in plan.data.items()}
    assert counts == {"calibration": 3, "evaluation": 2}
    assert plan.data["evaluation"].feeds
    seen = [feed["x"].flat[0] for feed in plan.data["evaluation"].batches()]
    assert seen == ([0, 1] if parts else [1, 3])
    assert "CHECK: calibrate" not in (tmp_path / "specs" / "spec.yaml").read_text()
    assert look_at(tmp_path / "feeds").words() == f"{2 if parts else 5} npz files"


def test_two_folders_beside_the_model_are_too_many(tmp_path):
    paint(tmp_path / "one")
    paint(tmp_path / "two")
    model = save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8))
    write_starter(model, tmp_path / "spec.yaml")
    assert "npz: calibration.npz" in (tmp_path / "spec.yaml").read_text()
    first, *_ = questions(model, Choices())
    assert first == Question("data", "Data, a folder or a file (- for none)", "-")


def test_what_a_person_is_asked(tmp_path, monkeypatch):
    paint(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    model = save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8))
    first, second, third = questions(model, Choices())
    assert first == Question("data", "Data (6 images in 2 classes; - for none)", "photos")
    assert (second.key, second.default, second.allowed[0]) == ("target", "ort-cpu", "ort-cpu")
    assert (third.key, third.default) == ("metric", "-")
    assert Choices(metric="top5").with_answer("metric", "-") == Choices()
    assert not list(questions(model, Choices(Path("photos"), "tensorrt", "top5")))
    write_starter(model, tmp_path / "spec.yaml", Choices().with_answer("data", "-"))
    assert "npz: calibration.npz" in (tmp_path / "spec.yaml").read_text()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (Choices(Path("nowhere")), "data 'nowhere': does not exist"),
        (Choices(Path("empty")), "data 'empty': holds no known kind of data"),
        (Choices(Path("commands")), "holds 2 WAV files in 2 classes, and no input of the model"),
        (Choices(Path("a.txt")), "is a file of text, which this model's spec does not take"),
        (Choices(target="ort-gpu"), "option --target: is 'ort-gpu'; did you mean 'ort-cpu'"),
        (Choices(metric="acuracy"), "option --metric: is 'acuracy'; did you mean 'accuracy'"),
    ],
)
def test_choices_that_do_not_fit_leave_no_file(tmp_path, monkeypatch, choices, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("text")
    sing(tmp_path / "commands")
    model = save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8))
    with pytest.raises(SpecError, match=message):
        write_starter(model, tmp_path / "spec.yaml", choices)
    assert not (tmp_path / "spec.yaml").exists()


@pytest.mark.slow
def test_of_a_speech_encoder_sounds_get_one_length(tmp_path):
    """The extractor does not say it, and samples of other lengths make no batch."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 5, "num_hidden_layers": 1}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    position = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(
        **sizes, **convolutions, **position, num_attention_heads=2, num_feat_extract_layers=2
    )
    model = tmp_path / "speech"
    transformers.Wav2Vec2ForCTC(config).save_pretrained(model)
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000).save_pretrained(model)
    sing(tmp_path / "sounds")
    plan = planned(model, Choices(data=tmp_path / "sounds"))
    assert plan.data["evaluation"].first(1)["input_values"].shape == (1, 16000)
    assert not isinstance(plan.model.carrier.inputs[0].shape[1], int)  # of any length
