"""Run a spec from the plan to the output folder: artifacts, reports and manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.errors import ExitCode
from compressor.files import json_sha256, json_text, remove_stale_staging, settle, switch
from compressor.lab.compare.history import read_history
from compressor.lab.compare.trend import Trend, record_run
from compressor.lab.explain.advice import Advice, advise
from compressor.lab.explain.by_sqnr import FinishedRun
from compressor.lab.verify.manifests import MANIFEST
from compressor.models.checkpoint.folder import CARD
from compressor.progress import SILENT, Progress
from compressor.report.html import html_report
from compressor.report.markdown import markdown_report
from compressor.report.model_card import is_shared, model_card
from compressor.report.past_runs import related_runs
from compressor.report.result import RunResult, check_free, stale_files
from compressor.report.samples import shown_samples
from compressor.run.artifacts import StoredArtifact, manifest, stage_artifacts, write_samples
from compressor.run.execute import execute
from compressor.run.options import DEFAULTS, RunOptions
from compressor.run.plan import make_plan
from compressor.run.store import Store, store_of
from compressor.run.workspace import Workspace
from compressor.spec.load import Spec
from compressor.types.proofs import sealed_text

_REPORTS = ("report.json", "report.md", "report.html")


def run_spec(spec: Spec, options: RunOptions = DEFAULTS, progress: Progress = SILENT) -> RunResult:
    """Run a spec: plan, passes, exports, verification, limits, report and manifest.

    Where several processes share the run, the others call :func:`help_run`.

    Raises:
        CompressorError: the run cannot continue; finished passes are kept for the next run.
    """
    check_free(spec.output, force=options.force)
    with progress.stage("plan"):
        plan = make_plan(spec, fresh=options.fresh)
        if options.history is not None:
            read_history(options.history)  # a damaged one shows before any long work
    store = Store(store_of(spec.output), progress.note)
    workspace = Workspace(plan, store, progress, options)
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
    artifacts: Sequence[StoredArtifact],
    advice: Advice,
    history: Trend | None = None,
) -> None:
    """Put artifacts, reports and manifest in the place of what an earlier run left, together."""
    output = workspace.plan.spec.output
    samples = shown_samples(report, workspace.evaluation)
    related = related_runs(output, report)
    page = html_report(report, related, history, advice.explanation, samples)
    texts = (json_text(report), markdown_report(report), page)
    with switch(output) as (staged, gone):
        stage_artifacts(artifacts, output, staged)
        others = [staged / name for name in _REPORTS]
        for path, text in zip(others, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        others += write_samples(workspace, artifacts, report["artifacts"], staged)
        entry = manifest(workspace, artifacts, others)
        if any(is_shared(str(file["name"])) for artifact in artifacts for file in artifact.files):
            lasting = manifest(workspace, artifacts, ())  # without times, which reports hold
            named = {**lasting, "fingerprint": json_sha256(lasting)}
            card = staged / CARD
            text = model_card(report, named, workspace.plan.model.carrier.folder)
            card.write_text(text, encoding="utf-8")
            entry = manifest(workspace, artifacts, [*others, card])
            entry["fingerprint"] = named["fingerprint"]
        gone += stale_files(output, [str(o["name"]) for o in entry["outputs"]])
        (staged / MANIFEST).write_text(sealed_text(entry), encoding="utf-8")
