"""``compress inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import json_option


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Say what is in a file or an output folder.

    PATH is a checkpoint (a file or a folder of safetensors), an ONNX file, or what a run left.
    Of a model: its tensors with shape, dtype, bytes, share of zeros and quantization, and totals.
    Of an output folder: the result, and whether its files are still those that the run wrote; if
    not, the exit code is 4.
    """
    from sys import stdout

    from compressor.cli.progress import shown_progress
    from compressor.errors import ExitCode
    from compressor.files import json_text
    from compressor.inspection.as_json import contents_json
    from compressor.inspection.open_path import inspect_path
    from compressor.pages.contents import contents_table
    from compressor.report.terminal import show

    with shown_progress() as progress:
        contents = inspect_path(path, progress)
    if as_json:
        click.echo(json_text(contents_json(contents)), nl=False)
    else:
        show(contents_table(contents), stdout)
    if not contents.intact:
        raise click.exceptions.Exit(int(ExitCode.ARTIFACT_FAILED))
