"""``compress run``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import json_option, set_option, spec_argument


@click.command()
@spec_argument
@set_option
@click.option("--fresh", is_flag=True, help="Forget what earlier runs of this spec finished.")
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def run(spec: Path, settings: tuple[str, ...], fresh: bool, as_json: bool, quiet: bool) -> None:
    """Compress, export, verify and report, as SPEC says.

    What an earlier run of the same spec finished is not done again. The result table goes to
    stderr; with --json the whole report goes to stdout instead.
    """
    from sys import stderr

    from compressor.cli.progress import shown_progress
    from compressor.files import json_text
    from compressor.report.terminal import show
    from compressor.report.text import result_table
    from compressor.run.runner import run_spec
    from compressor.spec.load import load_spec
    from compressor.user_code import importable

    with importable([Path.cwd()]), shown_progress(enabled=not quiet) as progress:
        result = run_spec(load_spec(spec, settings), fresh=fresh, progress=progress)
    if as_json:
        click.echo(json_text(result.report), nl=False)
    elif not quiet:
        if result.cached:
            click.echo("Nothing has changed: these are the results of an earlier run.", err=True)
        show(result_table(result.report, _near(result.output / "report.html")), stderr)
    raise click.exceptions.Exit(int(result.exit_code))


def _near(path: Path) -> str:
    """Write a path as seen from the current folder, where it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
