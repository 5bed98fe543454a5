"""The history of a model, and its trend."""

import json
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import DataError, InputError, SpecError
from compressor.lab.compare.compare import CompareOptions, compare_runs
from compressor.lab.compare.history import read_history
from compressor.lab.compare.runs import Side
from compressor.lab.compare.trend import recall, record
from compressor.report.pages.compare import change_lines
from tests.compressor.lab.compare.made_runs import made_run, results

NOTHING: frozenset = frozenset()


def side(folder: Path, samples: np.ndarray | None, **extra) -> Side:
    run = made_run(folder, samples, **extra)
    return compare_runs(run, run, CompareOptions(timing=False)).candidate


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Five runs, of which the fourth lost a point and a half."""
    path = tmp_path / "history" / "made.jsonl"
    for number, wrong in enumerate((5, 5, 6, 21, 20)):
        model = side(tmp_path / str(number), results(wrong))
        record(path, model, f"commit-{number}", NOTHING)
    return path


def test_the_run_where_the_metric_stepped_down_is_named(history: Path, tmp_path: Path) -> None:
    trend = recall(history, side(tmp_path / "next", results(20, start=1)), NOTHING)
    assert [point.label for point in trend.points][-2:] == ["commit-4", "this run"]
    (change,) = trend.changes
    assert (change.index, change.label) == (3, "commit-3")
    assert change.drop == pytest.approx(1.5, abs=0.05)
    (line,) = change_lines(trend)
    assert line.startswith("accuracy stepped down at run 4, 'commit-3': worse by 1.50 points, ")
    assert len(read_history(history)) == 5
    known = recall(history, side(tmp_path / "known", results(20)), NOTHING)
    assert len(known.points) == 5


def test_entries_keep_single_samples(history: Path) -> None:
    assert [int((1 - e.per_sample()).sum()) for e in read_history(history)] == [5, 5, 6, 21, 20]


def test_other_metrics_are_kept_as_numbers(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(2.0, 0.1, 50)
    path = tmp_path / "history.jsonl"
    trend = record(path, side(tmp_path / "a", values, metric="perplexity"), "", NOTHING)
    (entry,) = read_history(path)
    assert entry.per_sample() == pytest.approx(values, abs=1e-6)
    assert trend.points[0].label == "run 1"
    assert trend.points[0].value == pytest.approx(np.exp(values.mean()))
    worse = record(path, side(tmp_path / "b", values + 1, metric="perplexity"), "b", NOTHING)
    assert change_lines(worse)[0].startswith("perplexity stepped up at run 2, 'b': worse by 12.")


def test_the_same_run_twice_is_one_entry(history: Path, tmp_path: Path) -> None:
    model = side(tmp_path / "again", results(20))
    before = history.read_bytes()
    record(history, model, "commit-4", NOTHING)
    assert history.read_bytes() == before
    record(history, model, "commit-5", NOTHING)
    assert history.read_bytes().startswith(before)
    assert len(read_history(history)) == 6


def test_a_perfect_model_and_any_label_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for label in ("two\u2028lines\r\nor three", "next"):
        record(path, side(tmp_path / "run", results(0)), label, NOTHING)
    assert [entry.label for entry in read_history(path)] == ["two\u2028lines\r\nor three", "next"]


def test_a_line_without_end_is_completed(history: Path, tmp_path: Path) -> None:
    history.write_bytes(history.read_bytes().removesuffix(b"\n"))
    record(history, side(tmp_path / "more", results(7)), "more", NOTHING)
    assert len(read_history(history)) == 6


def test_a_full_disk_leaves_the_history_as_it_was(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = history.read_bytes()
    model = side(tmp_path / "more", results(7))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compressor.lab.compare.history.os.fsync", full)
    with pytest.raises(InputError, match="is full"):
        record(history, model, "more", NOTHING)
    assert history.read_bytes() == before


def test_an_empty_history_has_no_trend(tmp_path: Path) -> None:
    model = side(tmp_path / "run", results(5))
    empty = tmp_path / "empty.jsonl"
    with pytest.raises(SpecError, match="does not exist; compress gate --history begins one"):
        recall(empty, model, NOTHING)
    empty.write_text("\n")
    with pytest.raises(SpecError, match="is empty"):
        recall(empty, model, NOTHING)
    assert len(record(empty, model, "first", NOTHING).points) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "e" * 64}, "another evaluation data"),
        ({"model": "e" * 64}, "another float model"),
        ({"name": "other"}, "another name than this run .other against made."),
        ({"artifact": "other.onnx"}, "another artifact"),
        ({"metric_code": "e" * 64}, "another code of the metric"),
    ],
)
def test_other_models_have_histories_of_their_own(
    history: Path, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    history.write_text("".join(json.dumps({**line, **change}) + "\n" for line in lines))
    model = side(tmp_path / "next", results(5))
    with pytest.raises(SpecError, match=said):
        record(history, model, "next", NOTHING)
    if "model" in change:
        assert len(record(history, model, "next", frozenset({"model"})).points) == 6


def test_a_metric_of_another_direction_has_a_history_of_its_own(
    history: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    for line in lines:
        line["metric"]["higher_is_better"] = False
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SpecError, match=r"direction of the metric .* .lower is better against hi"):
        record(history, side(tmp_path / "next", results(5)), "next", NOTHING)


def test_lines_of_earlier_versions_do_not_tell_the_code_of_the_metric(
    history: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert {line.pop("metric_code") for line in lines} == {""}
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(record(history, side(tmp_path / "next", results(5)), "next", NOTHING).points) == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-40],
        lambda line: line[:0] + "[]",
        lambda line: line.replace('"schema": 1', '"schema": 2'),
        lambda line: line.replace('"samples": "b', '"samples": "b!'),
        lambda line: line.replace('"samples": "b', '"samples": "f'),
        lambda line: line.replace('"ci95": [', '"ci95": [NaN, '),
        lambda line: line.replace('"ci95"', '"ci"'),
        lambda line: line.replace('"label"', '"lable"'),
    ],
)
def test_a_damaged_line_is_named(history: Path, tmp_path: Path, damage) -> None:
    first, second, *rest = history.read_text().splitlines()
    assert damage(second) != second
    history.write_text("\n".join([first, damage(second), *rest]))
    with pytest.raises(InputError, match=r"made\.jsonl:2.*correct or remove that line"):
        recall(history, side(tmp_path / "next", results(5)), NOTHING)


def test_without_a_metric_there_is_nothing_to_keep(tmp_path: Path) -> None:
    model = side(tmp_path / "run", None)
    with pytest.raises(
        DataError, match=r"has no metric to keep in a history .the spec has no data\.evaluation"
    ):
        record(tmp_path / "history.jsonl", model, "", NOTHING)
    assert not (tmp_path / "history.jsonl").exists()
