"""Runs that cannot be compared, and what is said of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import CompressorError, ExitCode
from compressor.lab.compare.compare import CompareOptions, compare_runs
from tests.compressor.lab.compare.made_runs import made_run, results
from tests.compressor.tiny_project import Project

STORED = CompareOptions(timing=False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return made_run(tmp_path / "base", results(5))


def refusal(base: Path, candidate: Path, options: CompareOptions = STORED) -> CompressorError:
    with pytest.raises(CompressorError) as caught:
        compare_runs(base, candidate, options)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity/data": "e" * 64}, "evaluation data (bbbbbbbbbbbb against eeeeeeeeeeee)"),
        ({"identity/model": "e" * 64}, "the float model (aaaaaaaaaaaa against eeeeeeeeeeee)"),
        ({"identity/metric_code": "e" * 64}, "the metric's code (built in against eeeeeeeeeeee)"),
        ({"baseline/metric/name": "top5"}, "the metric (accuracy against top5)"),
        ({"baseline/metric": None}, "the metric (accuracy against none)"),
        (
            {"baseline/metric/higher_is_better": False},
            "the metric's direction (higher is better against lower is better)",
        ),
        (
            {"environment/versions/compressor": "0.2.0"},
            "the version of compressor (0.1.0 against 0.2.0)",
        ),
    ],
)
def test_what_differs_is_said(
    base: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    error = refusal(base, made_run(tmp_path / "other", results(5), changes=changes))
    assert error.exit_code is ExitCode.BAD_SPEC
    assert said in str(error)


def test_all_that_differs_is_said_at_once(base: Path, tmp_path: Path) -> None:
    changes = {"identity/data": "e" * 64, "identity/model": "f" * 64}
    error = refusal(base, made_run(tmp_path / "other", results(5), changes=changes))
    assert len(getattr(error, "errors", ())) == 2


def test_models_and_versions_may_differ_if_allowed(base: Path, tmp_path: Path) -> None:
    changes = {"identity/model": "e" * 64, "environment/versions/compressor": "0.2.0"}
    other = made_run(tmp_path / "other", results(5), changes=changes)
    allowed = CompareOptions(timing=False, allowed=frozenset({"model", "version"}))
    comparison = compare_runs(base, other, allowed)
    assert comparison.latency.source == "the two runs have different float models"
    assert comparison.notes == ("compressor: 0.1.0 in the base, 0.2.0 in the candidate",)


def edit_report(folder: Path) -> None:
    path = folder / "report.json"
    path.write_text(path.read_text().replace('"bytes": 1000000', '"bytes": 900000'))


def replace_samples(folder: Path) -> None:
    (folder / "samples.npz").write_bytes(b"others")


def half_a_character(folder: Path) -> None:
    rewrite(folder, {**json.loads((folder / "report.json").read_text()), "name": "\ud83d"})


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (edit_report, "report.json does not match manifest.json: it was edited"),
        (replace_samples, "samples.npz does not match manifest.json"),
        (break_manifest, "cannot be read"),
        (half_a_character, "surrogates not allowed"),
        (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
        (lambda folder: (folder / "samples.npz").unlink(), "has no samples.npz"),
        (
            lambda folder: (folder / "model.onnx").write_bytes(b"x"),
            "model.onnx does not match manifest.json",
        ),
    ],
)
def test_files_are_those_that_the_run_wrote(
    base: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    other = made_run(tmp_path / "other", results(5))
    damage(other)
    for pair in ((base, other), (other, base)):
        error = refusal(*pair)
        assert error.exit_code is ExitCode.BAD_INPUT
        assert said in str(error)


def test_artifacts_need_not_be_there(base: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "other", results(5))
    (other / "model.onnx").unlink()
    comparison = compare_runs(base, other / "report.json", CompareOptions())
    assert comparison.latency.value == pytest.approx(1.0)
    assert "has no model.onnx" in comparison.latency.source


def test_only_the_compared_artifact_is_missed(on_onnx: Project, tmp_path: Path) -> None:
    on_onnx.spec["exports"] = [{"format": "safetensors"}, {"format": "onnx"}]
    on_onnx.run()
    other = shutil.copytree(on_onnx.output, tmp_path / "other")
    (other / "model.safetensors").unlink()
    options = CompareOptions(artifact="model.onnx", base_artifact="model.onnx")
    compared = compare_runs(other, on_onnx.output, options)
    assert compared.latency.source == "both run in turn here, on random inputs"
    (other / "model.onnx").unlink()
    compared = compare_runs(other, on_onnx.output, options)
    assert f"{other} has no model.onnx" in compared.latency.source


def test_a_report_without_what_is_read_is_refused(base: Path, tmp_path: Path) -> None:
    for key in ("per_sample", "schema", "verdict"):
        other = made_run(tmp_path / key, results(5))
        report = json.loads((other / "report.json").read_text())
        del report[key]
        rewrite(other, report)
        assert f"cannot read ({key}: Field required)" in str(refusal(base, other))


def test_a_model_without_results_is_refused(base: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "other", results(5), artifacts=("other.onnx",))
    report = json.loads((other / "report.json").read_text())
    report["artifacts"][0]["path"] = "model.onnx"
    rewrite(other, report)
    assert "has no results for single samples of 'model.onnx'" in str(refusal(base, other))


def test_other_numbers_of_samples_are_refused(base: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "other", results(5, samples=999))
    assert "shapes [1000] and [999]" in str(refusal(base, other))


def rewrite(folder: Path, report: dict[str, Any]) -> None:
    """Write a report as a run would have."""
    from compressor.files import file_sha256
    from compressor.types.proofs import sealed_text

    path = folder / "report.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["outputs"][0]["sha256"] = file_sha256(path)
    (folder / "manifest.json").write_text(sealed_text(manifest))


def test_paths_are_checked(base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "nothing", "does not exist"),
        (tmp_path / "empty", "has no report.json"),
        (base / "model.onnx", "is not a report"),
    ):
        error = refusal(base, path)
        assert error.exit_code is ExitCode.BAD_SPEC
        assert said in str(error)


def test_which_artifact_is_meant_must_be_clear(base: Path, tmp_path: Path) -> None:
    both = made_run(tmp_path / "both", results(5), artifacts=("a.onnx", "b.engine"))
    assert "CANDIDATE" in str(refusal(base, both))
    assert "say which with --artifact" in str(refusal(base, both))

    def chosen(artifact: str, base_artifact: str | None = None) -> tuple[str, str]:
        options = CompareOptions(artifact, base_artifact, timing=False)
        found = compare_runs(both, both, options)
        return found.base.name, found.candidate.name

    assert chosen("b.engine") == ("b.engine", "b.engine")
    assert chosen("onnx") == ("a.onnx", "a.onnx")
    assert chosen("a.onnx", "float") == ("float", "a.onnx")
    assert chosen("a.onnx", "engine") == ("b.engine", "a.onnx")
    error = refusal(both, both, CompareOptions("a.onx", timing=False))
    assert "did you mean 'a.onnx'?" in str(error)


def test_the_bases_artifact_of_the_same_name_is_taken(base: Path, tmp_path: Path) -> None:
    both = made_run(tmp_path / "both", results(5), artifacts=("a.onnx", "model.onnx"))
    assert compare_runs(both, base, STORED).base.name == "model.onnx"


def test_the_bases_only_artifact_of_the_same_format_is_taken(tmp_path: Path) -> None:
    candidate = made_run(tmp_path / "candidate", results(5), artifacts=("new.onnx",))
    one = made_run(tmp_path / "one", results(5), artifacts=("old.onnx", "old.engine"))
    assert compare_runs(one, candidate, STORED).base.name == "old.onnx"
    two = made_run(tmp_path / "two", results(5), artifacts=("old.onnx", "older.onnx"))
    assert "say which with --base-artifact" in str(refusal(two, candidate))


def test_a_float_model_has_the_size_of_its_file(tmp_path: Path) -> None:
    """Its tensors alone are smaller: a file that shrank less than that looked larger."""
    sizes = {"artifacts/0/float_bytes": 4000, "artifacts/0/bytes": 1000}
    run = made_run(tmp_path / "run", results(5), changes=sizes)
    compared = compare_runs(run, run, CompareOptions("model.onnx", "float", timing=False))
    assert (compared.base.bytes, compared.size_ratio) == (4000, 0.25)
    assert compare_runs(run, run, CompareOptions("float", timing=False)).size_ratio == 1.0
