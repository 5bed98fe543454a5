"""``compress unpack``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import json_option


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder that the files go into.",
)
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    metavar="NAME",
    help="Take this tensor alone, and no graph. May be given again.",
)
@click.option("--force", is_flag=True, help="Replace files of the same names in the folder.")
@json_option
def unpack(path: Path, output: Path, tensors: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Take the files out of an archive.

    FILE is what the exporter archive wrote. The files are those that the safetensors exporter
    writes, bit for bit; compressor.load opens the folder. Every byte is checked on the way.
    """
    from dataclasses import asdict
    from sys import stderr

    from compressor import catalog
    from compressor.cli.options import shown_progress
    from compressor.files import json_text
    from compressor.report.pages.inspect import unpacked_table
    from compressor.report.terminal import show

    with shown_progress() as progress:
        files = catalog.load("format", "archive")().unpack(
            path, output, tensors, force=force, progress=progress
        )
    if as_json:
        document = {"folder": str(output), "files": [asdict(file) for file in files]}
        click.echo(json_text(document), nl=False)
    else:
        show(unpacked_table(files), stderr)
