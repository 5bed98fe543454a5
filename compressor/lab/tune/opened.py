"""Open what a search works on: the checked goal, the data apart, and the workbench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compressor.errors import SpecError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.recipe import spec_with
from compressor.lab.tune.search_data import search_data
from compressor.lab.tune.watch import Watch
from compressor.lab.tune.workbench import Workbench
from compressor.progress import Progress
from compressor.run.plan import Plan, make_plan
from compressor.run.store import Store, store_of
from compressor.run.verdicts.data_doubts import check_limit, shares_samples
from compressor.spec.load import Spec
from compressor.types.carrier import Capability


def opened_bench(
    spec: Spec, goal: Goal, progress: Progress, watch: Watch | None = None
) -> tuple[Workbench, Goal]:
    """Plan a spec, part its data, and return where its candidates are made, and the whole goal.

    Args:
        watch: whose time runs already; default: one without an end.

    Raises:
        CompressorError: the spec cannot be tuned.
    """
    opened = make_plan(spec)
    goal = _checked(spec, opened, goal)
    search = search_data(opened)
    base = _base(spec, search.calibration, short_names=goal.minimize == "size")
    plan = make_plan(base, None if search.calibration else opened)
    store = Store(store_of(base.output), progress.note)
    limit, watch = goal.metric_drop, watch or Watch()
    bench = Workbench(base, plan, search, store, progress, limit, goal.minimize, watch)
    return bench, goal


def _checked(spec: Spec, plan: Plan, goal: Goal) -> Goal:
    """Return the goal with the spec's own limits, where none was asked for.

    Raises:
        SpecError: nothing can be judged, or nothing limits the loss.
    """
    if "calibration" not in plan.data and "search" not in plan.data:
        raise SpecError(
            "data", "has nothing to search on", "add data.calibration", where=spec.where("data")
        )
    if plan.metric is None:
        raise SpecError(
            "data.evaluation",
            "is missing, and tune proves its answer on it",
            "add data.evaluation",
            where=spec.where("data"),
        )
    if shares_samples(spec, "search"):
        raise SpecError(
            "data.search",
            "reads samples of data.evaluation, on which the answer is proved",
            "name other samples, or let each read every other one (fold: 1/2 and fold: 2/2)",
            where=spec.where("data", "search"),
        )
    check_limit(goal.metric_drop, plan.metric, "option --max-metric-drop")
    if goal.train and Capability.TRAIN not in plan.model.carrier.offers:
        raise SpecError(
            "option --train",
            "needs a PyTorch module, and this model cannot be trained",
            "leave it out, or tune a spec with model.factory and data.training",
        )
    if goal.train and "training" not in plan.data:
        raise SpecError(
            "option --train",
            "is set, but the spec has nothing to train on",
            "add data.training, or leave it out",
            where=spec.where("data"),
        )
    if goal.metric_drop is not None or (goal.size_ratio is not None and goal.minimize == "size"):
        return goal
    limit = spec.limits.metric_drop
    default = spec.limits.is_default("metric_drop")
    if limit is None or (default and plan.metric.unit != "%"):
        share = f"the default for {plan.metric.name} is a share of what the float model will have"
        raise SpecError(
            "--max-metric-drop",
            f"is not given, and {share if default else 'the spec sets no limit'}",
            "say how much may be lost, or how small the file has to be (--max-size-ratio)",
        )
    size = goal.size_ratio
    if size is None and not spec.limits.is_default("size_ratio"):
        size = spec.limits.size_ratio
    return replace(goal, metric_drop=limit, size_ratio=size)


def _base(spec: Spec, calibration: Mapping[str, Any], short_names: bool) -> Spec:
    """Return the spec that candidates share: with a folder of its own, and without search data.

    Args:
        short_names: of ONNX files, which cost nothing.
    """
    value = spec.document.value
    data = {role: dict(entry) for role, entry in value["data"].items() if role != "search"}
    if calibration:
        data["calibration"].update(calibration)
    folder = value.get("output") or f"out/{spec.name}"
    exports = [dict(entry) for entry in value["exports"]]
    for entry in exports:
        if short_names and entry["format"] == "onnx":
            entry.setdefault("names", "short")
    return spec_with(spec, {"data": data, "exports": exports, "output": f"{folder}-tuned"})
