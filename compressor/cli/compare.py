"""``compress compare`` and ``compress gate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compressor.cli.options import (
    FILE,
    Number,
    compare_options,
    json_option,
    label_option,
    print_result,
    quiet_option,
    shown_progress,
)

if TYPE_CHECKING:
    from compressor.lab.compare.runs import Allowed


@click.command()
@compare_options
@json_option
def compare(
    base: Path,
    candidate: Path,
    artifact: str | None,
    base_artifact: str | None,
    allow: tuple[Allowed, ...],
    timing: bool,
    history: Path | None,
    as_json: bool,
) -> None:
    """Show two runs side by side, and test whether they differ.

    BASE and CANDIDATE are output folders of runs, or their report.json. The metric is compared
    sample by sample: McNemar's test for right or wrong results, a paired bootstrap for others. With
    --history, the runs in that file are shown, with the steps of the metric.
    """
    from compressor.lab.compare.compare import CompareOptions, compare_runs
    from compressor.lab.compare.trend import recall
    from compressor.report.pages.compare import comparison_page

    allowed = frozenset(allow)
    with shown_progress() as progress:
        options = CompareOptions(artifact, base_artifact, allowed, timing)
        comparison = compare_runs(base, candidate, options, progress)
    trend = None if history is None else recall(history, comparison.candidate, allowed)
    print_result(
        lambda: {**comparison.as_json(), "trend": trend and trend.as_json()},
        lambda: comparison_page(comparison, trend),
        as_json=as_json,
    )


@click.command()
@compare_options
@click.option(
    "--max-metric-drop",
    type=Number(min=0),
    metavar="DROP",
    help="Fail if the loss is real and larger than this, in points for shares. Without it, "
    "fail on any real loss.",
)
@click.option(
    "--max-latency-ratio",
    type=Number(min=0, min_open=True),
    metavar="RATIO",
    help="Fail if the whole interval of candidate over base lies above this.",
)
@click.option(
    "--max-size-ratio",
    type=Number(min=0, min_open=True),
    metavar="RATIO",
    help="Fail if the candidate is larger than this times the base.",
)
@click.option(
    "--alpha",
    type=Number(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="How often chance alone may fail an equally good candidate.",
)
@click.option("--strict", is_flag=True, help="Also fail if a limit is not proved to hold.")
@click.option("--junit", type=FILE, metavar="FILE", help="Write the checks as JUnit XML.")
@click.option("--markdown", type=FILE, metavar="FILE", help="Write the result as Markdown.")
@label_option
@json_option
@quiet_option
def gate(
    base: Path,
    candidate: Path,
    artifact: str | None,
    base_artifact: str | None,
    allow: tuple[Allowed, ...],
    timing: bool,
    history: Path | None,
    max_metric_drop: float | None,
    max_latency_ratio: float | None,
    max_size_ratio: float | None,
    alpha: float,
    strict: bool,
    junit: Path | None,
    markdown: Path | None,
    label: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Judge CANDIDATE against BASE: exit code 1 if a limit fails.

    BASE and CANDIDATE are output folders of runs, or their report.json. A metric fails if the loss
    exceeds the limit and chance cannot explain it: equally good models would lose as much with a
    probability below --alpha. A result that the samples cannot settle is unknown, and passes unless
    --strict. The result is appended to $GITHUB_STEP_SUMMARY if that is set. With --history, the
    candidate is added to that file, and the run at which the metric stepped is named.
    """
    from compressor.errors import ExitCode
    from compressor.lab.compare.compare import CompareOptions
    from compressor.lab.compare.gate import GateLimits
    from compressor.report.gate_files import GateFiles, run_gate
    from compressor.report.pages.compare import failure_lines, gate_page

    limits = GateLimits(max_metric_drop, max_latency_ratio, max_size_ratio, alpha, strict)
    options = CompareOptions(artifact, base_artifact, frozenset(allow), timing)
    files = GateFiles(junit, markdown, history, label)
    with shown_progress(enabled=not quiet) as progress:
        result, trend = run_gate(base, candidate, options, limits, files, progress)
    if as_json or not quiet:
        print_result(
            lambda: {**result.as_json(), "trend": trend and trend.as_json()},
            lambda: gate_page(result, trend),
            as_json=as_json,
        )
    else:
        for line in failure_lines(result):
            click.echo(line, err=True)
    raise click.exceptions.Exit(int(ExitCode.DONE if result.ok else ExitCode.LIMIT_FAILED))
