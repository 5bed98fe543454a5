"""``compress explain``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import (
    PATH,
    Number,
    json_option,
    near,
    print_result,
    set_option,
    shown_progress,
)


@click.command()
@click.argument("run", type=PATH)
@set_option
@click.option(
    "--method",
    type=click.Choice(("sqnr", "leave-one-out")),
    default="sqnr",
    show_default=True,
    help="Predict from each layer's noise in the report, or measure by leaving one layer at a "
    "time unchanged.",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="leave-one-out: measure the N noisiest layers only.",
)
@click.option(
    "--seconds",
    type=Number(min=0),
    metavar="S",
    help="leave-one-out: start no layer after S seconds; the same command resumes later.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="K",
    help="Suggest at most K changes.",
)
@click.option(
    "--apply",
    "applies",
    is_flag=True,
    help="Write the spec with these changes into a new file beside it.",
)
@json_option
def explain(
    run: Path,
    settings: tuple[str, ...],
    method: str,
    layers: int | None,
    seconds: float | None,
    top: int,
    applies: bool,
    as_json: bool,
) -> None:
    """Show what each layer of RUN costs, and what to change.

    RUN is a run's output folder, its report.json, or its spec; leave-one-out needs the spec. For
    each layer that a pass changed, it shows the scheme, the bytes that leaving the layer unchanged
    would cost (or giving it 8 bits, if it has fewer), and the gain. The changes with the largest
    gain per byte follow as rules to paste under the pass's `layers`; --apply writes the changed
    spec.
    """
    from compressor.errors import SpecError
    from compressor.lab.explain.advice import write_changed
    from compressor.lab.explain.by_sqnr import explain_by_sqnr, finished_run
    from compressor.lab.explain.leave_one_out import Budget, explain_by_leaving_out
    from compressor.report.pages.explain import explanation_page
    from compressor.spec.user_code import importable

    if method == "sqnr" and (layers is not None or seconds is not None):
        raise SpecError(
            "--layers and --seconds",
            "apply only to leave-one-out",
            "add --method leave-one-out",
        )
    with importable([Path.cwd()]):
        finished = finished_run(run, settings)
        if method == "sqnr":
            explanation = explain_by_sqnr(finished, top)
        else:
            with shown_progress() as progress:
                budget = Budget(layers, seconds)
                explanation = explain_by_leaving_out(finished, budget, top, progress)
        changes = explanation.suggested if applies else ()
        written = write_changed(finished, changes) if changes else None
    written = None if written is None else near(written)
    print_result(
        lambda: {**explanation.as_json(), "written": None if written is None else str(written)},
        lambda: explanation_page(explanation, written),
        as_json=as_json,
    )
