"""``compress compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compressor.cli.options import compare_options, json_option

if TYPE_CHECKING:
    from compressor.comparison.sides import Allowed


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
    sample by sample: McNemar's test for right or wrong results, a paired bootstrap for others.
    With --history, the runs of that file are shown, and where the metric stepped.
    """
    from sys import stdout

    from compressor.cli.progress import shown_progress
    from compressor.comparison.compare import CompareOptions, compare_runs
    from compressor.comparison.recording import recall
    from compressor.files import json_text
    from compressor.pages.comparison import comparison_page
    from compressor.report.terminal import show

    allowed = frozenset(allow)
    with shown_progress() as progress:
        options = CompareOptions(artifact, base_artifact, allowed, timing)
        comparison = compare_runs(base, candidate, options, progress)
    trend = None if history is None else recall(history, comparison.candidate, allowed)
    if as_json:
        document = {**comparison.as_json(), "trend": trend and trend.as_json()}
        click.echo(json_text(document), nl=False)
    else:
        show(comparison_page(comparison, trend), stdout)
