"""``compress unpack``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import PATH, json_option, shown_progress


@click.command()
@click.argument("path", metavar="FILE", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="The folder to write the files to.")
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    metavar="NAME",
    help="Unpack this tensor only, without the graph. May be repeated.",
)
@click.option("--force", is_flag=True, help="Replace files of the same names in the folder.")
@json_option
def unpack(path: Path, output: Path, tensors: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Unpack the files of an archive.

    FILE was written by the exporter archive. Its files are those that the safetensors exporter
    writes, bit for bit; compressor.load opens the folder. Every byte is checked on the way.
    """
    from dataclasses import asdict
    from sys import stderr

    from compressor import catalog
    from compressor.files import json_text
    from compressor.report import formats
    from compressor.report.page import Table, left, right
    from compressor.report.terminal import show

    with shown_progress() as progress:
        files = catalog.load("format", "archive")().unpack(
            path, output, tensors, force=force, progress=progress
        )
    if as_json:
        document = {"folder": str(output), "files": [asdict(file) for file in files]}
        click.echo(json_text(document), nl=False)
    else:
        rows = [[file.name, formats.size(file.bytes), file.sha256] for file in files]
        show([Table([*left("file"), *right("size"), *left("sha256")], rows)], stderr)
