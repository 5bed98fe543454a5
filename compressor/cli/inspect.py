"""``compress inspect``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import PATH, json_option, print_result, shown_progress


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--roofline",
    is_flag=True,
    help="Time the model's operators here, and show what bounds them and what compression could "
    "gain at best.",
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
    help="roofline: number of threads; default: one per core.",
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
    """Show what is in a file or an output folder.

    PATH is a checkpoint (a file or a folder of safetensors), a file of a runtime's format (.onnx,
    .ort, .gguf, .tflite, .pte, OpenVINO's .xml, .mlpackage), an archive, a TensorRT engine, or the
    output folder of a run.

    For a model, it shows the tensors with shape, dtype, bytes, share of zeros and quantization, and
    totals. For an engine, it shows the manifest, such as the precision of each layer. For an output
    folder, it shows the result, and whether its files are unchanged; if not, the exit code is 4.

    With --roofline, PATH is an ONNX file, an output folder with one, or a spec for its float
    model: per layer and in total, FLOPs, bytes moved, time, what bounds it on this machine (whose
    peaks are measured), and by Amdahl's law the best speed-up of each kind of compression.
    """
    from compressor.errors import ExitCode, SpecError
    from compressor.lab.inspect.contents import contents_json
    from compressor.lab.inspect.path import inspect_path
    from compressor.report.pages.inspect import contents_page

    if roofline:
        _roofline(path, batch, length, threads, as_json)
        return
    only_timed = {"--batch": batch, "--length": length, "--threads": threads}
    for option, value in only_timed.items():
        if value is not None:
            raise SpecError(option, "only matters when a model is timed", "add --roofline")
    with shown_progress() as progress:
        contents = inspect_path(path, progress)
    print_result(lambda: contents_json(contents), lambda: contents_page(contents), as_json=as_json)
    if not contents.intact:
        raise click.exceptions.Exit(int(ExitCode.ARTIFACT_FAILED))


def _roofline(
    path: Path, batch: int | None, length: int | None, threads: int | None, as_json: bool
) -> None:
    from compressor.lab.roofline.roofline import LENGTH, measure_roofline
    from compressor.report.pages.roofline import roofline_page
    from compressor.spec.user_code import importable

    with importable([Path.cwd()]), shown_progress() as progress:
        measured = measure_roofline(path, batch, threads, length or LENGTH, progress)
    print_result(measured.as_json, lambda: roofline_page(measured), as_json=as_json)
