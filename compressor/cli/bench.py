"""``compress bench``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import PATH, Number, json_option, print_result, shown_progress


@click.command()
@click.argument("paths", nargs=-1, type=PATH)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="SIZE",
    help="Samples in a run; may be repeated. Default: 1.",
)
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda", "tensorrt"]),
    help="Run all ONNX files in ONNX Runtime with this provider. By default, each runs in the "
    "runtime that it was written for.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of compute threads.",
)
@click.option(
    "--precision",
    type=Number(min=0, max=1, min_open=True),
    default=0.01,
    show_default=True,
    help="Stop when half the width of a ratio's interval is this share of the ratio.",
)
@click.option(
    "--seconds",
    type=Number(min=0),
    default=20.0,
    show_default=True,
    help="Stop after this time, for each batch size and for the cold starts.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="INPUT=1,128",
    help="Shape of an input, for lengths that the artifact leaves open. May be repeated.",
)
@click.option(
    "--data",
    type=PATH,
    metavar="FILE.npz",
    help="Samples to run on, one array per input, or one whole feed if an input has no sample "
    "axis. Default: random values.",
)
@click.option(
    "--ssh",
    metavar="HOST",
    help="Time on this ssh host, which needs Python, numpy and the runtime.",
)
@click.option(
    "--adb",
    metavar="SERIAL",
    help="Time on this adb device, which needs the same.",
)
@click.option(
    "--device-python",
    default="python3",
    show_default=True,
    metavar="COMMAND",
    help="Command that starts Python there.",
)
@click.option("--no-cold", is_flag=True, help="Measure neither cold starts nor peak memory.")
@json_option
def bench(
    paths: tuple[Path, ...],
    batches: tuple[int, ...],
    provider: str | None,
    threads: int,
    precision: float,
    seconds: float,
    shapes: tuple[str, ...],
    data: Path | None,
    ssh: str | None,
    adb: str | None,
    device_python: str,
    no_cold: bool,
    as_json: bool,
) -> None:
    """Time artifacts side by side.

    PATHS are exported files, folders of compressed models, or output folders of runs. The first one
    is the base of the ratios. Measures latency percentiles, throughput, each step of a cold start,
    peak memory, and energy if the machine counts it. Artifacts that cannot run here are listed with
    the reason.
    """
    from compressor.errors import SpecError
    from compressor.lab.bench.bench import BenchOptions, parse_shapes
    from compressor.lab.bench.bench import bench as measured
    from compressor.lab.bench.device import Device
    from compressor.report.pages.bench import benchmark_page
    from compressor.run.artifact_file import Machinery

    if ssh is not None and adb is not None:
        raise SpecError("--ssh and --adb", "name two devices", "give one of them")
    if (ssh or adb) and provider not in (None, "cpu"):
        raise SpecError("--provider", "is for this machine", "leave it out with --ssh and --adb")
    device = None
    if ssh is not None:
        device = Device("ssh", ssh, device_python)
    elif adb is not None:
        device = Device("adb", adb, device_python)
    options = BenchOptions(
        batches=batches,
        machinery=Machinery(provider, threads),
        precision=precision,
        seconds=seconds,
        cold=not no_cold,
        shapes=parse_shapes(shapes),
        data=data,
        device=device,
    )
    with shown_progress() as progress:
        result = measured(paths, options, progress)
    print_result(lambda: result, lambda: benchmark_page(result), as_json=as_json)
