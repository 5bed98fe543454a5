"""``compress run``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import (
    force_option,
    history_option,
    json_option,
    label_option,
    set_option,
    spec_argument,
)


@click.command()
@spec_argument
@set_option
@click.option("--fresh", is_flag=True, help="Forget what earlier runs of this spec finished.")
@force_option
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@history_option
@label_option
@click.option("--memory", is_flag=True, help="Measure the peak memory of each model, too.")
def run(
    spec: Path,
    settings: tuple[str, ...],
    fresh: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    history: Path | None,
    label: str,
    memory: bool,
) -> None:
    """Compress, export, verify and report, as SPEC says.

    What an earlier run of the same spec finished is not done again. The result table goes to
    stderr; with --json the whole report goes to stdout instead. Under torchrun, the processes
    share calibration batches and the shards of large checkpoints. With --history the run is
    added to that file, and the report draws how the metric went from run to run.
    """
    from compressor.cli.results import run_and_show
    from compressor.run.runner import RunOptions
    from compressor.spec.load import load_spec
    from compressor.spec.user_code import importable

    with importable([Path.cwd()]):
        options = RunOptions(fresh=fresh, force=force, history=history, label=label, memory=memory)
        code = run_and_show(load_spec(spec, settings), options, as_json=as_json, quiet=quiet)
    raise click.exceptions.Exit(code)
