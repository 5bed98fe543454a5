"""``compress tune``: from a spec and a goal to a tuned spec, its proof and its report."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from compressor.errors import SpecError
from compressor.files import json_text, switch, write_text
from compressor.lab.tune.answer import Answer, Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.from_model import in_a_spec, is_model
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.opened import opened_bench
from compressor.lab.tune.recipe import Recipe, spec_with
from compressor.lab.tune.tuning import Tuning
from compressor.lab.tune.watch import Watch
from compressor.lab.tune.workers import dask_crew
from compressor.lab.verify.manifests import MANIFEST
from compressor.models.garbage import objects_frozen
from compressor.progress import Progress, Silent
from compressor.report.markdown import markdown_page
from compressor.report.pages.tune import tune_page
from compressor.report.result import check_free, stale_files
from compressor.report.tune_front import tune_html
from compressor.run.artifacts import manifest, stage_artifacts
from compressor.run.execute import computing_for
from compressor.run.plan import Plan
from compressor.spec.load import Spec
from compressor.types.proofs import sealed_text

TUNED = "tuned.yaml"


@dataclass(frozen=True)
class Tuned:
    """A finished search.

    Attributes:
        spec: the file of the tuned spec; ``None`` where there is no answer.
    """

    answer: Answer
    spec: Path | None


def tune(
    spec: Spec,
    goal: Goal,
    output: Path | None = None,
    progress: Progress | None = None,
    crew: tuple[int | None, str | None] = (None, None),
) -> Tuned:
    """Search for the smallest or fastest artifact within the goal's limits, and prove it.

    Every candidate is stored by content: the same call resumes where it was stopped, and another
    goal for the same model uses what is there. The tuned spec and its artifact are replaced each
    time that there is a better one, so that the best so far is there when the search is stopped.

    Args:
        output: the file of the tuned spec, in the folder of the spec; default ``tuned.yaml``.
        crew: how many processes make candidates, or the address of a Dask scheduler.

    Raises:
        CompressorError: the spec cannot be tuned, or its own recipe fails.
    """
    progress, watch = progress or Silent(), Watch()
    watch.start(goal.seconds)
    file = _place(spec, output)
    with progress.stage("plan"), in_a_spec(spec):
        bench, goal = opened_bench(spec, goal, progress, watch)
    place = str(bench.spec.document.value["output"])
    answered = spec_with(bench.spec, {"output": place.removesuffix("tuned") + file.stem})
    check_free(answered.output, force=False)

    def publish(candidate: Candidate) -> None:
        write_text(file, spec_text(answered, candidate.recipe, goal))
        with switch(answered.output) as (staged, gone):
            stage_artifacts(candidate.written, answered.output, staged)
            entry = manifest(candidate.workspace, candidate.written, [])
            gone += stale_files(answered.output, [str(o["name"]) for o in entry["outputs"]])
            (staged / MANIFEST).write_text(sealed_text(entry), encoding="utf-8")

    with (
        bench.store.locked(),
        objects_frozen(),
        computing_for(bench.spec.exports),
        dask_crew(spec, goal, *crew, progress, watch) as workers,
    ):
        journal = Journal(bench, goal, path=_read_as(spec, bench.plan))
        answer = Tuning(bench, goal, publish, journal, workers).answer()
    written = None if answer.chosen is None else file
    write_text(file.with_suffix(".json"), json_text(answer.as_json()))
    name = None if written is None else file.name
    write_text(file.with_suffix(".md"), markdown_page(tune_page(answer, name)))
    write_text(file.with_suffix(".html"), tune_html(answer, file.with_suffix(".json").name, name))
    return Tuned(answer, written)


def _read_as(spec: Spec, plan: Plan) -> list[str]:
    """Return how samples become inputs, where nobody wrote it into a spec."""
    how = plan.data["evaluation"].preparation
    return [f"samples are read as {how}: check it"] if is_model(spec.document.path) and how else []


def _place(spec: Spec, output: Path | None) -> Path:
    folder = spec.document.path.parent
    file = folder / TUNED if output is None else output
    if file.resolve().parent != spec.folder:
        raise SpecError(
            f"output {str(file)!r}",
            f"is not in {str(folder)!r}, from which the spec's paths start",
            "name a file there",
        )
    if file.resolve() == spec.document.path.resolve() or file.suffix == ".onnx":
        raise SpecError(f"output {str(file)!r}", "is the spec itself", "name another file")
    return file


def spec_text(spec: Spec, recipe: Recipe, goal: Goal) -> str:
    """Return the tuned spec: plain YAML, which ``compress run`` runs to the same bytes."""
    limits: dict[str, Any] = {
        "metric-drop": goal.metric_drop,
        "size-ratio": goal.size_ratio,
        "latency-ratio": goal.latency_ratio,
    }
    value = {**spec.document.value, "passes": recipe.value(), "limits": limits}
    yaml = YAML()
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = StringIO()
    yaml.dump(value, text)
    return f"# Written by compress tune from {spec.document.path.name}.\n{text.getvalue()}"
