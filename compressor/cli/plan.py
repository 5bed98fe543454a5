"""``compress plan``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import json_option, set_option, spec_argument


@click.command()
@spec_argument
@set_option
@json_option
def plan(spec: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Check SPEC from end to end, and say what a run will do.

    For each layer: what happens to it, its bytes before and after, and why. Nothing heavy is
    computed, and nothing is written.
    """
    from sys import stdout

    from compressor.files import json_text
    from compressor.report.plan_text import plan_json, plan_table
    from compressor.report.terminal import show
    from compressor.run.plan import make_plan
    from compressor.spec.load import load_spec
    from compressor.spec.user_code import importable

    with importable([Path.cwd()]):
        made = make_plan(load_spec(spec, settings))
    if as_json:
        click.echo(json_text(plan_json(made)), nl=False)
    else:
        show(plan_table(made), stdout)
