"""Single decisions beside the float model's, and what a report says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from compressor.run.metrics.class_metrics import ACCURACY, PERPLEXITY
from compressor.run.metrics.metrics import COSINE
from compressor.run.verdicts.decisions import (
    MOST_SAMPLES,
    class_entries,
    decisions_of,
    flipped_entry,
    joined,
)
from compressor.run.verdicts.verdicts import BLIND
from tests.compressor.tiny_project import Project


def logits(*rows: tuple[float, ...]) -> dict[str, np.ndarray]:
    return {"logits": np.array(rows, np.float32)}


FLOAT = logits((5, 0, 0), (0, 2, 1), (0, 1, 3), (9, 0, 8))
OURS = logits((4, 0, 1), (0, 1, 2), (0, 3, 1), (1, 0, 8))
LABELS = np.array([0, 1, 1, 0])  # right; lost; won; lost, and the float model was nearer to it


def test_lost_decisions_come_first_and_the_most_certain_of_them():
    entry = flipped_entry(decisions_of(OURS, FLOAT, LABELS, ACCURACY), "model.onnx")
    assert entry is not None
    assert entry["artifact"] == "model.onnx"
    assert (entry["samples"], entry["flipped"], entry["lost"], entry["won"]) == (4, 3, 2, 1)
    assert [row["index"] for row in entry["worst"]] == [1, 3, 2]
    assert entry["worst"][2] == {
        "index": 2,
        "place": None,
        "target": 1,
        "float": 2,
        "artifact": 1,
        "margin": 2.0,
    }


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_labels_of_any_type_are_the_same_decisions(dtype: type):
    """Labels of MNIST's type ended each run in an ``OverflowError``."""
    found = decisions_of(OURS, FLOAT, LABELS.astype(dtype), ACCURACY)
    wanted = decisions_of(OURS, FLOAT, LABELS, ACCURACY)
    assert found is not None
    assert wanted is not None
    np.testing.assert_array_equal(found.classes, wanted.classes)
    np.testing.assert_array_equal(found.margins, wanted.margins)


def test_shifted_labels_are_unknown(on_onnx: Project):
    with np.load(on_onnx.folder / "test.npz") as data:
        image = data["image"]
    model = ort.InferenceSession(on_onnx.folder / "tiny.onnx")
    own = model.run(None, {"image": image})[0].argmax(1)
    np.savez(on_onnx.folder / "test.npz", image=image, label=(own + 1) % 4)
    on_onnx.spec["passes"] = [{"pass": "fuse"}]
    on_onnx.spec["limits"]["metric-drop"] = 50
    report = on_onnx.run().report
    (limit,) = report["limits"]
    assert (limit["verdict"], limit["measured"]) == ("unknown", 0.0)
    assert limit["reason"].startswith(BLIND)
    on_onnx.run()  # what is stored says the same
    assert on_onnx.report()["limits"] == report["limits"]


def test_classes_that_lost_most_come_first():
    entries = class_entries(decisions_of(OURS, FLOAT, LABELS, ACCURACY))
    assert entries == [
        {"class": 0, "samples": 2, "float": 100.0, "artifact": 50.0, "change": -50.0},
        {"class": 1, "samples": 2, "float": 50.0, "artifact": 50.0, "change": 0.0},
    ]


def test_of_many_decisions_the_hardest_overturned_one_that_counts_is_kept():
    theirs = {"logits": np.array([[[5, 0], [3, 0], [9, 0]]], np.float32)}
    ours = {"logits": np.array([[[4, 0], [0, 1], [0, 1]]], np.float32)}
    labels = np.array([[0, 1, -100]])  # the last is padding
    decisions = decisions_of(ours, theirs, labels, PERPLEXITY)
    entry = flipped_entry(decisions, "model.onnx")
    assert entry is not None
    (row,) = entry["worst"]
    assert (row["place"], row["target"], row["float"], row["artifact"]) == (1, 1, 0, 1)
    assert class_entries(decisions) is None


def test_each_sample_keeps_its_hardest_decision_whatever_the_class():
    """Class 0 is no padding, and padding is none where all of it is."""
    theirs = np.array([[[5, 0], [9, 0], [3, 0]], [[0, 4], [2, 0], [0, 1]]], np.float16)
    ours = {"logits": theirs[:, :, ::-1]}
    expected = {"logits": theirs}
    for labels, places, targets, margins in (
        (np.array([[1, 0, 1], [0, 1, 1]]), [1, 0], [0, 0], [9, 4]),
        (np.array([[0, -100, 0], [0, 0, -1]]), [0, 0], [0, 0], [5, 4]),
        (np.array([[1, -100, -1, -100, 1, -1]]), [0, 1], [1, 1], [5, 2]),
        (np.full((2, 3), -100), [1, 0], [-1, -1], [9, 4]),
        (None, [1, 0], [-1, -1], [9, 4]),
    ):
        decisions = decisions_of(ours, expected, labels, PERPLEXITY)
        assert decisions is not None
        assert decisions.classes[:, 0].tolist() == places
        assert decisions.classes[:, 1].tolist() == targets
        flips = [[0, 1], [1, 0]] if places[1] == 0 else [[0, 1], [0, 1]]
        assert decisions.classes[:, 2:].tolist() == flips
        assert decisions.margins.tolist() == margins
        assert decisions.choices == 2
        assert (decisions.classes.dtype, decisions.margins.dtype) == (np.int32, np.float32)
        assert decisions.labelled == (max(targets) >= 0)
        entry = flipped_entry(decisions, "model.onnx")
        assert entry is not None
        assert {row["index"]: row["place"] for row in entry["worst"]} == dict(enumerate(places))


def test_batches_are_joined_in_their_order():
    parts = [decisions_of(OURS, FLOAT, LABELS, ACCURACY), None]
    parts += [decisions_of(FLOAT, FLOAT, LABELS, ACCURACY)]
    whole = joined(parts)
    assert whole is not None
    assert whole.single
    assert whole.flipped.tolist() == [False, True, True, True] + [False] * 4
    assert whole.margins.tolist() == [0.0, 1.0, 2.0, 1.0] + [0.0] * 4
    assert joined(parts[:1]) is not None
    assert joined([None]) is None
    assert joined([]) is None


def test_without_labels_nothing_is_lost_or_won():
    entry = flipped_entry(decisions_of(OURS, FLOAT, FLOAT, ACCURACY), "model.onnx")
    assert entry is not None
    assert (entry["flipped"], entry["lost"], entry["won"]) == (3, None, None)
    assert [row["index"] for row in entry["worst"]] == [2, 1, 3]
    assert class_entries(decisions_of(OURS, FLOAT, FLOAT, ACCURACY)) is None


def test_metrics_that_are_not_about_classes_have_no_decisions():
    assert decisions_of(OURS, FLOAT, LABELS, COSINE) is None
    assert flipped_entry(None, "model.onnx") is None
    assert class_entries(None) is None


def test_the_report_shows_so_many_at_most():
    rows = np.eye(2, dtype=np.float32)[np.zeros(50, int)]
    entry = flipped_entry(
        decisions_of({"y": rows[:, ::-1]}, {"y": rows}, np.zeros(50, int), ACCURACY), "m"
    )
    assert entry is not None
    assert (entry["flipped"], len(entry["worst"])) == (50, MOST_SAMPLES)


@pytest.mark.parametrize(("classes", "shown"), [(1000, 1000), (1001, None)])
def test_very_many_classes_are_not_listed(classes: int, shown: int | None):
    answers = {"y": np.eye(classes, dtype=np.float32)}
    entries = class_entries(decisions_of(answers, answers, np.arange(classes), ACCURACY))
    assert (None if entries is None else len(entries)) == shown


def test_of_classes_that_changed_as_much_the_worse_comes_first():
    theirs = np.array([0, 0, 0, 0, 1, 2, 2, 3])  # of class 3, none was right and one is
    ours = np.array([0, 0, 0, 1, 1, 2, 1, 2])
    labels = np.array([0, 0, 1, 0, 1, 2, 2, 2])
    one_hot = np.eye(4, dtype=np.float32)
    decisions = decisions_of({"y": one_hot[ours]}, {"y": one_hot[theirs]}, labels, ACCURACY)
    entries = class_entries(decisions)
    assert entries is not None
    assert [(e["class"], e["samples"], round(e["change"])) for e in entries] == [
        (0, 3, -33),
        (1, 2, 0),
        (2, 3, 0),
    ]
    assert [round(e["artifact"]) for e in entries] == [67, 50, 67]


def test_samples_without_a_label_are_in_no_class():
    labels = np.array([0, -1, 1, 0])
    decisions = decisions_of(OURS, FLOAT, labels, ACCURACY)
    entries = class_entries(decisions)
    assert entries is not None
    assert [(e["class"], e["samples"]) for e in entries] == [(0, 2), (1, 1)]
    entry = flipped_entry(decisions, "model.onnx")
    assert entry is not None
    assert (entry["flipped"], entry["lost"], entry["won"]) == (3, 1, 1)
    assert [(row["index"], row["target"]) for row in entry["worst"]] == [(3, 0), (2, 1), (1, None)]


def test_a_report_says_what_its_artifact_decides(on_onnx: Project):
    on_onnx.spec["passes"] = [
        {"pass": "quantize-static", "weights": {"bits": 4}, "activations": {"bits": 4}}
    ]
    on_onnx.run()
    report = on_onnx.report()
    with np.load(on_onnx.folder / "test.npz") as data:
        images, labels = data["image"], data["label"]
    answers = [predicted(p, images) for p in (on_onnx.folder / "tiny.onnx", artifact(on_onnx))]
    flipped = np.flatnonzero(answers[0] != answers[1])
    assert len(flipped) > 0
    entry = report["flipped"]
    assert entry["artifact"] == "model.onnx"
    assert (entry["samples"], entry["flipped"]) == (len(labels), len(flipped))
    assert {row["index"] for row in entry["worst"]} == set(flipped[:MOST_SAMPLES].tolist())
    for row in report["classes"]:
        of = labels == row["class"]
        assert row["samples"] == of.sum()
        assert row["artifact"] == pytest.approx(100 * (answers[1][of] == row["class"]).mean())
    weighted = sum(row["artifact"] * row["samples"] for row in report["classes"]) / len(labels)
    assert weighted == pytest.approx(report["artifacts"][0]["metric"]["value"])
    on_onnx.run()  # from the store
    assert on_onnx.report()["flipped"] == entry


def artifact(project: Project) -> Path:
    return project.output / "model.onnx"


def predicted(path: Path, images: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"image": images})[0]).argmax(1)
