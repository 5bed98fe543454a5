"""Run a spec from the plan to the output folder: artifacts, reports and manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import ExitCode, ModelError, SpecError
from compressor.files import (
    file_sha256,
    is_file_name,
    json_text,
    read_json,
    remove_stale_staging,
    settle,
    switch,
)
from compressor.lab.compare.history import read_history
from compressor.lab.compare.trend import Trend, record_run
from compressor.lab.explain.advice import Advice, advise
from compressor.lab.explain.by_sqnr import FinishedRun
from compressor.progress import Progress, Silent
from compressor.report.html import Shown, html_report
from compressor.report.markdown import markdown_report
from compressor.report.past_runs import related_runs
from compressor.report.samples import shown_samples
from compressor.run.artifacts import Artifact, manifest, stage_artifacts, write_samples
from compressor.run.execute import RunOptions, execute
from compressor.run.plan import make_plan
from compressor.run.store import STORE, Store
from compressor.run.workspace import Workspace
from compressor.spec.load import Spec
from compressor.types.proofs import sealed_text

_REPORTS = ("report.json", "report.md", "report.html")
_MANIFEST = "manifest.json"
_ONCE = RunOptions()


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        report: the content of ``report.json``.
        exit_code: 0, 1 where a limit failed or, for a strict run, is unknown, 4 where an artifact
            failed its check.
        cached: nothing had changed: every result is that of an earlier run.
    """

    report: Mapping[str, Any]
    output: Path
    exit_code: ExitCode
    cached: bool


def run_spec(
    spec: Spec, options: RunOptions = _ONCE, progress: Progress | None = None
) -> RunResult:
    """Run a spec: plan, passes, exports, verification, limits, report and manifest.

    Where several processes share the run, the others call :func:`help_run`.

    Raises:
        CompressorError: the run cannot continue; finished passes are kept for the next run.
    """
    progress = progress or Silent()
    # Refuse a folder that holds somebody else's files, unless that is forced.
    if spec.output.exists() and not spec.output.is_dir():
        raise SpecError(f"output {str(spec.output)!r}", "is a file", "name a folder")
    foreign = (
        spec.output.is_dir() and not (spec.output / STORE).is_dir() and any(spec.output.iterdir())
    )
    if foreign and not options.force:
        raise SpecError(
            f"output {str(spec.output)!r}",
            "holds files that no run of compressor made",
            "name another folder, empty this one, or replace files of the same names with --force",
        )
    with progress.stage("plan"):
        plan = make_plan(spec)
        if options.history is not None:
            read_history(options.history)  # a damaged one shows before any long work
    store = Store(spec.output / STORE, progress.note)
    workspace = Workspace(
        plan,
        store,
        progress,
        options.ranks,
        options.identify_by_headers,
        options.memory,
        options.proves,
    )
    with store.locked():
        settle(spec.output)
        remove_stale_staging(spec.output)
        if options.fresh:
            store.forget()
        options.ranks.wait()
        report, artifacts = execute(workspace)
        advice = advise(FinishedRun(spec.output, report, {"spec": spec.resolved}, spec))
        report = {**report, "advice": advice.as_json()}
        _publish(workspace, report, artifacts, advice)
        if options.history is not None:
            trend = record_run(spec.output, options.history, options.label, progress)
            _publish(workspace, report, artifacts, advice, trend)
    failed_check = any(not c["ok"] for a in report["artifacts"] for c in a["checks"])
    passes = report["ok"] and not (options.strict and report["verdict"] == "unknown")
    code = ExitCode.DONE if passes else ExitCode.LIMIT_FAILED
    code = ExitCode.ARTIFACT_FAILED if failed_check else code
    return RunResult(report, spec.output, code, cached=store.written == 0)


def _publish(
    workspace: Workspace,
    report: Mapping[str, Any],
    artifacts: Sequence[Artifact],
    advice: Advice,
    history: Trend | None = None,
) -> None:
    """Put artifacts, reports and manifest in the place of what an earlier run left, together."""
    output = workspace.plan.spec.output
    shown = Shown(advice.explanation, shown_samples(report, workspace.evaluation))
    page = html_report(report, related_runs(output, report), history, shown)
    texts = (json_text(report), markdown_report(report), page)
    with switch(output) as (staged, gone):
        stage_artifacts(artifacts, output, staged)
        others = [staged / name for name in _REPORTS]
        for path, text in zip(others, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        others += write_samples(workspace, artifacts, report["artifacts"], staged)
        entry = manifest(workspace, artifacts, others)
        gone += _stale(output, [str(o["name"]) for o in entry["outputs"]])
        (staged / _MANIFEST).write_text(sealed_text(entry), encoding="utf-8")


def _stale(output: Path, kept: Sequence[str]) -> list[str]:
    try:
        old = read_json(output / _MANIFEST, "", "")
        written = {str(entry["name"]): str(entry["sha256"]) for entry in old["outputs"]}
    except (ModelError, KeyError, TypeError):  # none, or not ours: nothing to remove
        return []
    gone = {name: digest for name, digest in written.items() if name not in kept}
    return [
        name
        for name, digest in gone.items()
        if is_file_name(name) and (output / name).is_file() and file_sha256(output / name) == digest
    ]
