"""Measure what each layer costs: apply the passes again with another rule for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compressor.calibration.statistics_cache import StatisticsCache
from compressor.errors import CompressorError, SpecError
from compressor.graph.costs import model_bytes
from compressor.lab.explain.by_sqnr import FinishedRun, suspects, written_bytes
from compressor.lab.explain.explanation import (
    Change,
    Explanation,
    Gain,
    LayerCost,
    best,
    share_of,
    together,
)
from compressor.progress import SILENT, Progress
from compressor.report import formats
from compressor.run.evaluate import Evaluation
from compressor.run.metrics.judged import compared_parts
from compressor.run.metrics.metrics import resolve_metric
from compressor.run.pipeline import Step, apply_pass, pass_parts, run_passes
from compressor.run.plan import PassPlan, Plan, make_plan
from compressor.run.store import Store, result_key, store_of
from compressor.run.verdicts.statistics import paired_difference
from compressor.run.workspace import Workspace
from compressor.spec.load import Spec
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.passes import Pass


@dataclass
class Variants:
    """Makes variants of a finished run; statistics are collected once."""

    workspace: Workspace
    steps: Sequence[Step]
    _collected: StatisticsCache = field(default_factory=lambda: StatisticsCache(math.inf))

    def key(self, changes: Sequence[Change]) -> str:
        """Return the key of a variant, without making it: the same that a run would give it.

        Raises:
            SpecError: a pass cannot be changed so.
        """
        return self._follow(changes, make=False)[0]

    def make(self, changes: Sequence[Change]) -> Carrier:
        """Apply the changed passes and those after them, and return the model after all.

        Raises:
            CompressorError: a pass fails.
        """
        self.workspace.load()
        carrier = self._follow(changes, make=True)[1]
        assert carrier is not None
        return carrier

    def _follow(self, changes: Sequence[Change], *, make: bool) -> tuple[str, Carrier | None]:
        passes = list(self.workspace.plan.spec.passes)
        for change in reversed(changes):  # the first stands in front
            passes[change.index] = change.applied(passes[change.index])
        first = min(change.index for change in changes)
        workspace = self._with(passes)
        before = self.steps[first - 1] if first else None
        key = workspace.source_key if before is None else before.key
        carrier = workspace.plan.model.carrier if before is None else before.carrier
        for index in range(first, len(passes)):
            planned = workspace.plan.passes[index]
            upstream, key = key, result_key("pass", key, **pass_parts(workspace, index, planned))
            if make:
                carrier = self._applied(workspace, index, carrier, upstream)
        return key, carrier if make else None

    def _with(self, passes: Sequence[Pass]) -> Workspace:
        """Return a workspace for other options of the passes; the model's key is known."""
        plan = self.workspace.plan
        other = replace(plan, spec=replace(plan.spec, passes=tuple(passes)))
        workspace = Workspace(
            other, self.workspace.store, self.workspace.progress, collected=self._collected
        )
        workspace.source_key = self.workspace.source_key
        return workspace

    def _applied(
        self, workspace: Workspace, index: int, carrier: Carrier, upstream: str
    ) -> Carrier:
        declared = workspace.plan.spec.passes[index]
        torch.manual_seed(workspace.plan.spec.seed)
        adapted = declared.adapted(carrier, workspace.plan.context)
        survey = declared.survey(adapted, workspace.plan.context)
        return apply_pass(workspace, declared, adapted, survey, upstream).carrier


def obstacle(plans: Sequence[PassPlan], index: int) -> str:
    """Return why a pass's layers are not measured one by one; empty where they are."""
    if plans[index].trains:
        return f"{plans[index].name} trains, and would train once for every layer"
    for later in plans[index + 1 :]:
        if later.trains:
            return f"{later.name} comes after it, and would train once for every layer"
    return ""


_ADDED = (
    "layers interact: a change may gain more or less beside others than alone, so the prediction "
    "for several is only a sum; 'measured together' is a fact"
)
_CHANCE = (
    "intervals are 95 %, from the same samples with and without the change; of {count} layers "
    "without any effect about {false:.1f} would show one by chance"
)


@dataclass(frozen=True)
class Budget:
    """How much is measured; results that are stored already cost nothing.

    Attributes:
        layers: the most layers, the noisiest first; ``None`` for all.
        seconds: no layer is begun after so long; ``None`` for no end.
    """

    layers: int | None = None
    seconds: float | None = None


def explain_by_leaving_out(
    run: FinishedRun, budget: Budget, count: int, progress: Progress = SILENT
) -> Explanation:
    """Explain a run by measuring what each change of a single layer brings.

    Results are stored by content: the same call resumes where it was stopped, and a later run of
    a changed spec reuses them.

    Args:
        run: a finished run, named by its spec.

    Raises:
        CompressorError: the run was not named by its spec, there are no data, or a pass fails.
    """
    if run.spec is None:
        raise SpecError(
            f"run {str(run.folder)!r}",
            "does not say where its spec is, and leaving layers out runs the passes again",
            "pass the spec instead of the folder, or use --method sqnr",
        )
    with progress.stage("plan"):
        plan = _with_data(make_plan(run.spec), run.spec)
    store = Store(store_of(run.spec.output), progress.note)
    with store.locked():
        return _Measuring(Workspace(plan, store, progress), budget).explanation(run, count)


def _with_data(plan: Plan, spec: Spec) -> Plan:
    """Let the calibration data be what is measured on, where there are no evaluation data."""
    if Capability.RUN not in plan.model.carrier.offers:
        raise SpecError(
            f"spec {str(spec.document.path)!r}",
            "names a model that cannot be run, so nothing can be measured",
            "use --method sqnr, which looks at weights",
        )
    if plan.metric is not None:
        return plan
    if "calibration" not in plan.data:
        raise SpecError(
            "data",
            "has neither evaluation nor calibration, and leave-one-out needs one",
            "add data.evaluation, or use --method sqnr",
            where=spec.where("data"),
        )
    parts = compared_parts(plan.model.carrier, plan.data["calibration"])
    metric = resolve_metric("cosine", False, spec.symbol, spec.where("metric"), parts=parts)
    data = {**plan.data, "evaluation": plan.data["calibration"]}
    return replace(plan, data=data, metric=metric)


class _Measuring:
    """Measures changes within a budget.

    Args:
        workspace: the run, with data to evaluate on.
    """

    def __init__(self, workspace: Workspace, budget: Budget):
        self._workspace = workspace
        self._budget = budget
        self._steps: list[Step] = run_passes(workspace)
        self._variants = Variants(workspace, self._steps)
        last = self._steps[-1]
        self._base = self._evaluated(last.key, last.carrier.runner, ())
        self._bytes = int(last.result["bytes"])
        self._start = time.monotonic()

    def explanation(self, run: FinishedRun, count: int) -> Explanation:
        """Measure layer by layer, and then the best changes together."""
        plan = self._workspace.plan
        measured, left_out = self._measured(suspects(run))
        best_layers = best(measured, count)
        changes = tuple(cost.change for cost in best_layers)
        joint = self._joint(changes, left_out)
        measured.sort(key=lambda cost: -(cost.gain.sqnr_db or 0.0))
        return Explanation(
            name=plan.spec.name,
            method="leave-one-out",
            data=plan.data["evaluation"].role,
            metric=self._base.metric,
            bytes=written_bytes(run.report),
            sqnr_db=self._base.sqnr_db,
            layers=tuple(measured),
            passes=tuple(step.name for step in self._steps),
            suggested=changes,
            predicted=together([cost.gain for cost in best_layers]) if best_layers else None,
            measured=joint,
            left_out=tuple(left_out),
            notes=(_ADDED, _CHANCE.format(count=len(measured), false=0.025 * len(measured))),
        )

    def _measured(self, layers: Sequence[LayerCost]) -> tuple[list[LayerCost], list[str]]:
        plans = self._workspace.plan.passes
        reasons = {i: obstacle(plans, i) for i in {cost.change.index for cost in layers}}
        left_out = [f"all layers of {plans[i].name}: {why}" for i, why in reasons.items() if why]
        open_layers = [cost for cost in layers if not reasons[cost.change.index]]
        limit = self._budget.layers
        to_measure = open_layers if limit is None else open_layers[:limit]
        self._workspace.progress.note(self._estimate(to_measure))
        done: list[LayerCost] = []
        late = 0
        with self._workspace.progress.stage("leave one layer out", len(to_measure)) as advance:
            for index, cost in enumerate(to_measure):
                try:
                    gain = self._gain((cost.change,))
                except CompressorError as error:
                    left_out.append(f"{cost.change.layer}: {error.subject}: {error.problem}")
                    continue
                if gain is None:
                    late += 1
                else:
                    done.append(replace(cost, gain=gain))
                advance(index + 1, cost.change.layer)
        if late:
            left_out.append(f"{formats.plural(late, 'layer')}: the time was up (--seconds)")
        if len(open_layers) > len(to_measure):
            rest = formats.plural(len(open_layers) - len(to_measure), "layer")
            left_out.append(f"{rest} with less noise: the budget was {limit} (--layers)")
        return done, left_out

    def _estimate(self, layers: Sequence[LayerCost]) -> str:
        """Return what measuring costs: the passes take at most what they took in the run."""
        seconds = 0.0
        for cost in layers:
            seconds += sum(float(s.result["seconds"]) for s in self._steps[cost.change.index :])
        return (
            f"{formats.plural(len(layers), 'layer')} to measure, each with an evaluation; the "
            f"passes alone take up to {formats.seconds(seconds)}, less what is stored already"
        )

    def _joint(self, changes: tuple[Change, ...], left_out: list[str]) -> Gain | None:
        if len(changes) < 2:
            return None
        try:
            gain = self._gain(changes)
        except CompressorError as error:
            left_out.append(f"the suggestions together: {error.subject}: {error.problem}")
            return None
        if gain is None:
            left_out.append("the suggestions together: the time was up (--seconds)")
        return gain

    def _gain(self, changes: tuple[Change, ...]) -> Gain | None:
        """Measure what changes bring; ``None`` where no result is stored and the time is up."""
        store, key = self._workspace.store, self._variants.key(changes)
        stored_key = result_key("explain", key)
        stored: dict[str, Any] | None = store.read(stored_key)
        if stored is not None:
            evaluation = self._evaluated(
                key, lambda: self._variants.make(changes).runner(), changes
            )
            return self._compared(evaluation, int(stored["bytes"]))
        limit = self._budget.seconds
        if limit is not None and time.monotonic() - self._start > limit:
            return None
        carrier = self._variants.make(changes)
        evaluation = self._evaluated(key, carrier.runner, changes)
        size = model_bytes(carrier)
        store.keep(stored_key, {"bytes": size})
        return self._compared(evaluation, size)

    def _evaluated(
        self, key: str, make_runner: Callable[[], Runner], changes: Sequence[Change]
    ) -> Evaluation:
        names = ", ".join(change.layer for change in changes)
        label = f"with another rule for {names}" if changes else "after all passes"
        evaluation = self._workspace.evaluated(key, make_runner, label)
        assert evaluation is not None
        return evaluation

    def _compared(self, changed: Evaluation, size: int) -> Gain:
        metric = self._workspace.plan.metric
        assert metric is not None
        difference = paired_difference(self._base.per_sample, changed.per_sample, metric.scale)
        gained = None
        if self._base.sqnr_db is not None and changed.sqnr_db is not None:
            gained = changed.sqnr_db - self._base.sqnr_db
        share = 100.0 if changed.sqnr_db is None else None
        return Gain(
            bytes=size - self._bytes,
            sqnr_db=gained,
            noise_share=share if gained is None else share_of(gained),
            metric=-difference.drop,
            ci95=(-difference.ci95[1], -difference.ci95[0]),
        )
