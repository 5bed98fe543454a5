"""Models that are run on whole feeds, and models that carry a state over sequences of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from compressor.errors import CompressorError
from compressor.run.evaluate import RunSamples
from compressor.run.recurrence import Recurrence
from compressor.spec.user_code import importable
from compressor.types.tensors import TensorSpec
from tests.compressor.voice import MODEL, WIDTH, Voice

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def voice(tmp_path: Path) -> Voice:
    return Voice(tmp_path)


def walked(model: Path, sequence: Arrays) -> tuple[Arrays, list[Arrays]]:
    """Run a sequence by hand: what the model gave over all steps, and what it took in each."""
    session = ort.InferenceSession(str(model))
    state = np.zeros((2, sequence["input"].shape[1], WIDTH), np.float32)
    given, taken = [], []
    for frame in sequence["input"]:
        taken.append({"input": frame, "state": state, "sr": sequence["sr"]})
        prob, state = session.run(["prob", "stateN"], taken[-1])
        given.append(prob)
    return {"prob": np.stack(given)}, taken


def cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("passes", "size"),
    [
        ([{"pass": "fuse"}, {"pass": "quantize-static"}], 0.3),
        ([{"pass": "fuse"}, {"pass": "quantize-dynamic"}], 0.3),
    ],
    ids=["static", "dynamic"],
)
def test_a_model_with_a_state_goes_from_a_file_to_a_verified_artifact(
    tmp_path: Path, passes: list[dict[str, Any]], size: float
):
    voice = Voice(tmp_path, passes)
    voice.run()
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["ok"]
    (artifact,) = report["artifacts"]
    assert all(check["ok"] for check in artifact["checks"])
    assert artifact["size_ratio"] < size
    assert artifact["latency"][0]["batch"] == 1
    # The artifact carries its own state, not the float model's.
    clips = [dict(np.load(path)) for path in sorted((tmp_path / "evaluation").iterdir())]
    probabilities = [
        [walked(file, c)[0]["prob"] for c in clips]
        for file in (tmp_path / MODEL, tmp_path / "out/model.onnx")
    ]
    wanted = [cosine(a, b) for a, b in zip(*probabilities, strict=True)]
    with np.load(tmp_path / "out/samples.npz") as samples:
        assert samples["model.onnx"] == pytest.approx(wanted, abs=1e-9)
    assert artifact["metric"]["samples"] == len(clips)
    worst = max(np.abs(a - b).max() for a, b in zip(*probabilities, strict=True))
    assert artifact["max_abs_diff"] == pytest.approx(worst, rel=1e-3)


def test_calibration_sees_the_state_of_every_step(voice: Voice):
    plan = voice.plan()
    data, carrier = plan.data["calibration"], plan.model.carrier
    samples = RunSamples(carrier.inputs, data, 0, carrier=carrier)
    feeds = list(samples.batches())
    clips = [dict(np.load(path)) for path in sorted((voice.folder / "calibration").iterdir())]
    wanted = [feed for c in clips for feed in walked(voice.folder / MODEL, c)[1]]
    assert len(feeds) == len(wanted) == sum(len(c["input"]) for c in clips)
    for feed, want in zip(feeds, wanted, strict=True):
        assert feed.keys() == want.keys()
        for name in want:
            np.testing.assert_allclose(feed[name], want[name], atol=1e-6)


def test_a_first_state_in_the_files_is_taken_whether_or_not_inputs_name_it(voice: Voice):
    for path in (voice.folder / "evaluation").iterdir():
        clip = dict(np.load(path))
        np.savez(path, **clip, state=np.full((2, clip["input"].shape[1], WIDTH), 0.5, np.float32))
    inputs = {"input": "input", "sr": "sr"}
    firsts = []
    for fields in ({}, inputs, {**inputs, "state": "state"}):
        voice.spec["data"]["evaluation"]["inputs"] = fields
        firsts.append(voice.plan().data["evaluation"].first(1)["state"])
    assert all((first == 0.5).all() for first in firsts)
    np.savez(path, **clip, state=np.zeros((2, 1, WIDTH + 1), np.float32))
    with pytest.raises(CompressorError, match=rf"state.*{WIDTH + 1}"):
        voice.plan()


def test_a_sequence_without_steps_is_refused(voice: Voice):
    path = max((voice.folder / "evaluation").iterdir())
    clip = dict(np.load(path))
    np.savez(path, **{**clip, "input": clip["input"][:0]})
    with pytest.raises(CompressorError, match=rf"{path.name} of evaluation data: has no steps"):
        voice.plan()


def test_axes_without_a_name_have_nothing_in_common():
    inputs = (
        TensorSpec("input", (None, None), "float32"),
        TensorSpec("h", (2, None, 4), "float32"),
    )
    recurrence = Recurrence(inputs, {"h": 1}, 2, "data")
    first = recurrence.first({"input": np.zeros((3, 1, 512), np.float32)})
    assert first["h"].shape == (2, 1, 4)


def test_a_state_that_changes_its_shape_is_refused(voice: Voice):
    """A state that grows, as a cache of keys and values does, has no fixed shape to carry."""
    value = helper.make_tensor_value_info
    x = value("x", TensorProto.FLOAT, ["batch", 8])
    past, longer = (value(n, TensorProto.FLOAT, [f"{n}_length", 8]) for n in ("past", "longer"))
    nodes = [helper.make_node("Concat", ["past", "x"], ["longer"], axis=0)]
    graph = helper.make_graph(nodes, "cache", [x, past], [longer])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, voice.folder / MODEL)
    for entry in voice.spec["data"].values():
        entry["state"] = {"past": "longer"}
    for path in voice.folder.glob("*/*.npz"):
        np.savez(path, x=np.zeros((3, 1, 8), np.float32))
    with pytest.raises(CompressorError) as refused:
        voice.run()
    assert (
        "state 'past': goes into step 0 with shape [1, 8], and comes out with shape [2, 8]; "
        in (str(refused.value))
    )


def ragged(folder: Path) -> None:
    """Write a model of ``features [T, 8]`` and ``length []`` that gives logits ``[4]``."""
    value, node = helper.make_tensor_value_info, helper.make_node
    rng = np.random.default_rng(0)
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [8, 4], rng.standard_normal(32).tolist()),
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        helper.make_tensor("flat", TensorProto.INT64, [1], [1]),
    ]
    nodes = [
        node("Reshape", ["length", "flat"], ["end"]),
        node("Slice", ["features", "zero", "end"], ["said"]),
        node("MatMul", ["said", "w"], ["scores"], "scores"),
        node("ReduceMean", ["scores", "zero"], ["logits"], keepdims=0),
    ]
    inputs = [
        value("features", TensorProto.FLOAT, ["time", 8]),
        value("length", TensorProto.INT64, []),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, [4]),
        value("scores", TensorProto.FLOAT, ["n", 4]),
    ]
    graph = helper.make_graph(nodes, "ragged", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / MODEL)


MAKER = """
import numpy as np

def feeds():
    rng = np.random.default_rng(1)
    for i in range(24):
        length = int(rng.integers(2, 9))
        yield {
            "features": rng.standard_normal((10, 8)).astype(np.float32),
            "length": length,
            "label": np.array(i % 4),
        }

def first_logit(outputs, target):
    assert outputs["logits"].shape == (4,)
    return float(outputs["logits"][int(target)])
"""


@pytest.mark.parametrize("metric", ["accuracy", "feeds_maker:first_logit", None])
def test_feeds_of_any_length_from_a_factory(voice: Voice, metric: str | None):
    ragged(voice.folder)
    (voice.folder / "feeds_maker.py").write_text(MAKER)
    data = {"factory": "feeds_maker:feeds", "samples": "feeds"}
    names = {"features": "features", "length": "length"}
    evaluation = {**data, "inputs": names, "target": "label"}
    voice.spec["data"] = {
        "calibration": {**data, "inputs": names},
        "evaluation": evaluation if metric else {**data, "inputs": names},
    }
    voice.spec |= {"metric": metric, "passes": [{"pass": "quantize-static"}]}
    with importable([voice.folder]):
        importlib.invalidate_caches()
        voice.run()
        maker = importlib.import_module("feeds_maker")
    report = json.loads((voice.folder / "out/report.json").read_text())
    (artifact,) = report["artifacts"]
    assert all(check["ok"] for check in artifact["checks"])
    assert artifact["metric"]["samples"] == 24
    session = ort.InferenceSession(str(voice.folder / "out/model.onnx"))
    rows = []
    for feed in maker.feeds():
        label = int(feed.pop("label"))
        logits, _ = session.run(None, {n: np.asarray(a) for n, a in feed.items()})
        rows.append(logits[label] if metric and ":" in metric else 100 * (logits.argmax() == label))
    if metric is not None:
        assert artifact["metric"]["value"] == pytest.approx(np.mean(rows), rel=1e-6)
    else:
        assert 0.99 < artifact["metric"]["value"] < 1.0


def test_stacked_data_are_judged_by_outputs_that_have_samples(voice: Voice):
    """An output of the whole batch, such as a state or a mean, is not one of samples."""
    value, node = helper.make_tensor_value_info, helper.make_node
    weight = np.random.default_rng(0).standard_normal(64)
    nodes = [
        node("MatMul", ["x", "w"], ["y"]),
        node("Constant", [], ["all"], value_ints=[0, 1]),
        node("ReduceMean", ["y", "all"], ["mean"], keepdims=0),
    ]
    outputs = [value("mean", TensorProto.FLOAT, []), value("y", TensorProto.FLOAT, ["batch", 8])]
    inputs = [value("x", TensorProto.FLOAT, ["batch", 8])]
    weights = [helper.make_tensor("w", TensorProto.FLOAT, [8, 8], weight.tolist())]
    for count in (2, 1):
        graph = helper.make_graph(nodes, "mean", inputs, outputs[:count], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.save(model, voice.folder / MODEL)
        rng = np.random.default_rng(0)
        np.savez(voice.folder / "x.npz", x=rng.standard_normal((40, 8)).astype(np.float32))
        voice.spec["data"] = {"evaluation": {"npz": "x.npz", "batch": 16}}
        voice.spec["output"] = f"out{count}"
        if count == 2:
            voice.run()
            report = json.loads((voice.folder / "out2/report.json").read_text())
            assert report["artifacts"][0]["metric"]["samples"] == 40
            continue
        with pytest.raises(CompressorError) as refused:
            voice.plan()
        assert (
            "metric 'cosine': needs an output with an axis of samples, and 'mean' has shape []"
            in (str(refused.value))
        )


@pytest.mark.parametrize(
    ("passes", "inputs"),
    [
        ([{"pass": "fuse"}, {"pass": "quantize-dynamic"}], ["input", "state", "sr"]),
        ([{"pass": "fuse"}], ["sr", "state", "input"]),
    ],
)
def test_without_data_such_a_model_is_proved_on_made_up_feeds(
    voice: Voice, passes: list[dict[str, Any]], inputs: list[str]
):
    model = onnx.load(voice.folder / MODEL)
    by_name = {value.name: value for value in model.graph.input}
    del model.graph.input[:]
    model.graph.input.extend(by_name[name] for name in inputs)
    onnx.save(model, voice.folder / MODEL)
    voice.spec |= {"data": {}, "passes": passes}
    voice.run()
    report = json.loads((voice.folder / "out/report.json").read_text())
    assert all(check["ok"] for check in report["artifacts"][0]["checks"])
