"""Run a spec, and show what came of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from compressor.run.runner import RunOptions
    from compressor.spec.load import Spec


def run_and_show(spec: Spec, options: RunOptions, *, as_json: bool, quiet: bool) -> int:
    """Run a spec and print its results; returns the exit code.

    Of the processes that ``torchrun`` starts, the first alone prints.
    """
    from sys import stderr

    from compressor.cli.progress import shown_progress
    from compressor.files import json_text
    from compressor.report.terminal import show
    from compressor.report.text import result_table
    from compressor.run.ranks import ranks
    from compressor.run.runner import help_run, run_spec

    with ranks() as group, shown_progress(enabled=not quiet and group.rank == 0) as progress:
        options = replace(options, ranks=group)
        if group.rank:
            help_run(spec, options)
            return 0
        result = run_spec(spec, options, progress)
    if as_json:
        click.echo(json_text(result.report), nl=False)
    elif not quiet:
        if result.cached:
            click.echo("Nothing has changed: these are the results of an earlier run.", err=True)
        show(result_table(result.report, _near(result.output / "report.html")), stderr)
    return int(result.exit_code)


def _near(path: Path) -> str:
    """Write a path as seen from the current folder, where it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
