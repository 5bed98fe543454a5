"""``compress passes`` and ``compress exporters``."""

from __future__ import annotations

from typing import Literal

import click

from compressor.cli.options import json_option


@click.command()
@click.argument("name", required=False)
@json_option
def passes(name: str | None, as_json: bool) -> None:
    """List the passes, or describe one.

    With NAME: its documentation, source, needs and options.
    """
    _show("pass", name, as_json=as_json)


@click.command()
@click.argument("name", required=False)
@json_option
def exporters(name: str | None, as_json: bool) -> None:
    """List the artifact formats, or describe one.

    With NAME: its documentation and options.
    """
    _show("exporter", name, as_json=as_json)


def _show(kind: Literal["pass", "exporter"], name: str | None, *, as_json: bool) -> None:
    from dataclasses import asdict
    from sys import stdout

    from compressor.files import json_text
    from compressor.pages.options import description_table, overview_table
    from compressor.report.terminal import show
    from compressor.spec.describe import describe, overview

    if name is None:
        entries = overview(kind)
        if as_json:
            click.echo(json_text([asdict(entry) for entry in entries]), nl=False)
        else:
            show(overview_table(entries), stdout)
        return
    description = describe(kind, name)
    if as_json:
        click.echo(json_text(asdict(description)), nl=False)
    else:
        show(description_table(description), stdout)
