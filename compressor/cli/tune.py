"""``compress tune``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click

from compressor.cli.options import (
    FILE,
    PATH,
    Number,
    json_option,
    near,
    print_result,
    quiet_option,
    set_option,
    shown_progress,
)

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class _Time(click.ParamType[float]):
    """A time such as 90, 90s, 10m or 2h, in seconds."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time: write 90s, 10m or 2h", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


def _refuse(what: str, options: Mapping[str, object]) -> None:
    """Refuse options that do not go with what is tuned."""
    from compressor.errors import SpecError

    for name, value in options.items():
        if value:
            remedy = "leave it out; a model is an .onnx file or a folder of transformers"
            raise SpecError(f"option {name}", f"is given with {what}", remedy)


@click.command()
@click.argument("spec", metavar="SPEC_OR_MODEL", type=PATH)
@set_option
@click.option(
    "--data",
    type=PATH,
    help="For a model without a spec: a folder of images, WAV or npy files, or a file: .npz, .npy, "
    ".safetensors, .txt or .jsonl. No labels are needed.",
)
@click.option(
    "--metric",
    metavar="NAME",
    help="For a model without a spec: how its outputs are compared with the float model's; "
    "default: agreement if it scores classes, else cosine.",
)
@click.option(
    "--max-metric-drop",
    type=Number(min=0),
    metavar="X",
    help="How much the metric may lose, in its unit (points); default: the spec's limit.",
)
@click.option(
    "--max-size-ratio",
    type=Number(min=0, min_open=True),
    metavar="X",
    help="Bytes over those of the float model, at most.",
)
@click.option(
    "--max-latency-ratio",
    type=Number(min=0, min_open=True),
    metavar="X",
    help="Latency over the float model's, at most.",
)
@click.option(
    "--minimize",
    type=click.Choice(("size", "latency")),
    default="size",
    show_default=True,
    help="What to minimize within the limits.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    metavar="N",
    help="Solve, write, measure and correct at most N times.",
)
@click.option(
    "--train",
    is_flag=True,
    help="Also try training (qat, distill); needs data.training, and takes long.",
)
@click.option(
    "--budget",
    type=_Time(),
    metavar="TIME",
    help="Take at most this time, such as 10m, proofs included; the same command resumes later.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Make candidates in N processes (extra: dask); timings still run alone.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Make candidates on a Dask cluster whose machines share this folder (extra: dask).",
)
@click.option("--strict", is_flag=True, help="Also exit with 1 if the answer is not proved.")
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="File for the tuned spec, in the folder of SPEC; default: tuned.yaml there, or "
    "in the current folder for a model.",
)
@json_option
@quiet_option
def tune(
    spec: Path,
    settings: tuple[str, ...],
    data: Path | None,
    metric: str | None,
    max_metric_drop: float | None,
    max_size_ratio: float | None,
    max_latency_ratio: float | None,
    minimize: Literal["size", "latency"],
    rounds: int,
    train: bool,
    budget: float | None,
    workers: int | None,
    scheduler: str | None,
    strict: bool,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find the smallest or fastest artifact, and prove it.

    SPEC names the model and a pass to tune. Without a spec, MODEL is an ONNX file or a folder of
    transformers, and --data has typical samples without labels. The spec that compress init would
    write is tuned, and judged by its fidelity to the float model.

    Options that cost nothing (equalization, observers, rounding) are tried first, then the width of
    each layer: the noise of each width is measured once, a knapsack chooses, the choice is written
    and measured, and so on. Candidates are compared on samples of their own (data.search, or
    samples of the calibration source that do not calibrate). The best are then proved on the
    evaluation data in a fixed order.

    Writes tuned.yaml, which compress run runs to the same bytes, and tuned.json, tuned.md and
    tuned.html. With --max-size-ratio alone, the answer is the artifact of that size that loses
    least. A stopped command leaves the best artifact so far, and resumes when it is run again. If
    the evaluation data are too few to prove any artifact, the answer is the smallest that keeps the
    limit as measured, and is called not proved. The exit code is 1 if there is no answer.
    """
    from compressor.errors import ExitCode
    from compressor.lab.tune.answer import Goal
    from compressor.lab.tune.from_model import is_model, spec_of_model
    from compressor.lab.tune.tune import tune as find
    from compressor.report.pages.tune import headline, tune_page
    from compressor.spec.load import load_spec
    from compressor.spec.user_code import importable

    goal = Goal(max_metric_drop, max_size_ratio, max_latency_ratio, minimize, rounds, budget, train)
    with (
        importable([Path.cwd()]),
        shown_progress(enabled=not quiet, lines=not as_json) as progress,
    ):
        if is_model(spec):
            _refuse("a model", {"--set": settings})
            folder = Path.cwd() if output is None else output.resolve().parent
            loaded = spec_of_model(spec, data, metric, folder)
        else:
            _refuse("a spec, which names it", {"--data": data, "--metric": metric})
            loaded = load_spec(spec, settings)
        found = find(loaded, goal, output, progress, (workers, scheduler))
    written = None if found.spec is None else near(found.spec)
    missed = found.spec is None or (strict and found.answer.verdict != "passed")
    if as_json or not quiet:
        print_result(
            lambda: {
                **found.answer.as_json(),
                "written": None if written is None else str(written),
            },
            lambda: tune_page(found.answer, written),
            as_json=as_json,
        )
    elif missed:
        click.echo(headline(found.answer), err=True)
    if missed:
        raise click.exceptions.Exit(int(ExitCode.LIMIT_FAILED))
