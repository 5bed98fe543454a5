"""``compress inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import json_option


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--roofline",
    is_flag=True,
    help="Time the model's operators here, and say what bounds them and what compression could "
    "bring at best.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", help="roofline: samples in a run."
)
@click.option(
    "--length",
    type=click.IntRange(min=1),
    metavar="N",
    help="roofline: length of dynamic axes other than the batch's; default: 128.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="roofline: threads that compute; default: one a core.",
)
@json_option
def inspect(
    path: Path,
    roofline: bool,
    batch: int | None,
    length: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Say what is in a file or an output folder.

    PATH is a checkpoint (a file or a folder of safetensors), an ONNX file, an archive, a TensorRT
    engine, or what a run left.
    Of a model: its tensors with shape, dtype, bytes, share of zeros and quantization, and totals.
    Of an engine: what its manifest says, such as the type that each layer is computed with.
    Of an output folder: the result, and whether its files are still those that the run wrote; if
    not, the exit code is 4.

    With --roofline, PATH is an ONNX file, an output folder with one, or a spec for its float
    model: per layer and in all FLOPs, bytes moved, what bounds it on this machine (its peaks are
    measured), its time, and by Amdahl's law the best speed-up of each kind of compression.
    """
    from sys import stdout

    from compressor.cli.options import shown_progress
    from compressor.errors import ExitCode, SpecError
    from compressor.files import json_text
    from compressor.lab.inspect.contents import contents_json
    from compressor.lab.inspect.path import inspect_path
    from compressor.report.pages.inspect import contents_table
    from compressor.report.terminal import show

    if roofline:
        _roofline(path, batch, length, threads, as_json)
        return
    given = {"--batch": batch, "--length": length, "--threads": threads}
    for option, value in given.items():
        if value is not None:
            raise SpecError(option, "says how a model is timed", "add --roofline")
    with shown_progress() as progress:
        contents = inspect_path(path, progress)
    if as_json:
        click.echo(json_text(contents_json(contents)), nl=False)
    else:
        show(contents_table(contents), stdout)
    if not contents.intact:
        raise click.exceptions.Exit(int(ExitCode.ARTIFACT_FAILED))


def _roofline(
    path: Path, batch: int | None, length: int | None, threads: int | None, as_json: bool
) -> None:
    from sys import stdout

    from compressor.cli.options import shown_progress
    from compressor.files import json_text
    from compressor.lab.roofline.roofline import LENGTH, measure_roofline
    from compressor.report.pages.roofline import roofline_page
    from compressor.report.terminal import show
    from compressor.spec.user_code import importable

    with importable([Path.cwd()]), shown_progress() as progress:
        found = measure_roofline(path, batch, threads, length or LENGTH, progress)
    if as_json:
        click.echo(json_text(found.as_json()), nl=False)
    else:
        show(roofline_page(found), stdout)
