"""Plan a spec: check everything that can be checked before heavy work, and predict the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from compressor.calibration.collect import make_observer
from compressor.errors import SpecError, located
from compressor.graph.costs import model_bytes, model_macs, model_parameters, turn_notes
from compressor.graph.output_parts import with_parts
from compressor.models.checkpoint.adapters import unused_adapter
from compressor.models.garbage import without_collector
from compressor.models.layer_uses import input_limits
from compressor.models.onnx.checks import check_repeats
from compressor.models.transformers.pooling import pooling_of
from compressor.run.causal import window_doubts
from compressor.run.data import Data, check_data, open_data
from compressor.run.export_plan import ExportPlan, plan_exports
from compressor.run.layer_rows import LayerRow, layer_rows
from compressor.run.memory import peak_memory
from compressor.run.metrics.class_metrics import fitted
from compressor.run.metrics.judged import compared_parts
from compressor.run.metrics.metrics import Metric, resolve_metric, single_number
from compressor.run.metrics.text_metrics import pooled_as
from compressor.run.model import OpenedModel, open_model, open_other_model, option_path
from compressor.run.unreached import unreached_weights
from compressor.run.verdicts.data_doubts import (
    check_data_is_of_use,
    check_limit,
    check_output_apart,
    data_doubts,
    why_foreign,
)
from compressor.run.verdicts.verdicts import check_reachable
from compressor.run.weight_pass import WeightPass
from compressor.spec.keys import MetricKeys
from compressor.spec.load import Spec
from compressor.types.carrier import Capability, Carrier
from compressor.types.exporter import STORED
from compressor.types.passes import GraphPass, LayerPlan, Pass, PassContext, TrainPass
from compressor.types.statistics import Request
from compressor.types.tensors import Batch

_SMALLER = 0.99  # the share of the bytes from which on a model counts as smaller


@dataclass(frozen=True)
class PassPlan:
    """What one pass will do.

    Attributes:
        bytes: of the model's tensors after it.
        estimate: they depend on weights or data, of this pass or of one before it.
        memory: of statistics that the pass gathers by itself.
    """

    name: str
    layers: tuple[LayerPlan, ...]
    requests: tuple[Request, ...]
    notes: tuple[str, ...]
    bytes: int
    blockwise: bool = False
    replays: str = ""
    trains: bool = False
    estimate: bool = False
    memory: int = 0

    @property
    def reads_data(self) -> bool:
        """The result depends on the calibration data."""
        return bool(self.requests or self.replays)


@dataclass(frozen=True)
class Plan:
    """A spec that has been checked from end to end.

    Attributes:
        model: the float model, its weights not read yet.
        context: what passes are told about the spec.
        previews: the model after each pass, with weights that mean nothing.
        bytes: of the float model's tensors.
        macs: multiply-accumulates for one sample; ``None`` without a graph.
        warnings: limits that the prediction says will not hold, and artifacts that cannot be
            judged by all of them, one sentence each.
        doubts: those of the warnings that are about the results: about data, an adapter, weights.
        training_metric: what training is judged by: the metric, or where nothing is evaluated, the
            one that the spec would be judged by if its training data were the evaluation data.
    """

    spec: Spec
    model: OpenedModel
    data: Mapping[str, Data]
    metric: Metric | None
    context: PassContext
    passes: tuple[PassPlan, ...]
    exports: tuple[ExportPlan, ...]
    rows: tuple[LayerRow, ...]
    previews: tuple[Carrier, ...]
    bytes: int
    parameters: int
    macs: int | None
    peak_memory: int
    warnings: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    training_metric: Metric | None = None

    @property
    def final(self) -> Carrier:
        """The model after all passes, with weights that mean nothing."""
        return self.previews[-1] if self.previews else self.model.carrier

    @property
    def shrinks(self) -> bool:
        """Whether the passes make the model smaller, by one percent at least."""
        return _shrinks(self.passes, self.bytes)


@without_collector()
def make_plan(spec: Spec, like: Plan | None = None, *, fresh: bool = False) -> Plan:
    """Check a spec against its model and data, and predict what a run will do.

    Reads headers, one sample of each data source, and the model's structure.

    Args:
        like: the plan of a spec with the same model, data and first passes, which are taken over.
        fresh: nothing that an earlier command has kept is used.

    Raises:
        CompressorError: anything that would make the run fail, as far as it can be known.
    """
    model = open_model(spec, fresh=fresh) if like is None else like.model
    carrier = model.carrier
    if Capability.GRAPH in carrier.offers:
        with located(spec.where("model", "inputs")):
            check_repeats(carrier.graph(), "model")
    check_data_is_of_use(spec, carrier)
    check_output_apart(spec)
    data = like.data if like else open_data(spec, carrier.inputs, carrier.outputs)
    limits = input_limits(carrier)
    samples = {role: check_data(entry, carrier.inputs, limits) for role, entry in data.items()}
    metric = _metric(spec, data, carrier, samples)
    training_metric = metric or _training_metric(spec, data, carrier)
    targets = frozenset[str]().union(*(e.targets for e in spec.exports))
    context = PassContext(
        spec.seed,
        targets,
        None if training_metric is None else training_metric.name,
        {name: array.shape for name, array in samples.get("calibration", {}).items()},
        carrier,
    )
    passes: list[PassPlan] = []
    previews: list[Carrier] = []
    known = 0 if like is None else _planned_before(spec, context, like)
    float_model, guessed = carrier, False
    leaves_graph = ""  # the pass that made a graph of a module
    for index, step in enumerate(spec.passes):
        if like is not None and index < known:
            plan, after = like.passes[index], like.previews[index]
        else:
            with located(spec.where("passes", index)):
                plan, after = _plan_pass(step, carrier, context, data, leaves_graph)
                _check_named(spec, index, carrier)
        previews.append(after)
        guessed = guessed or step.estimated
        passes.append(replace(plan, estimate=guessed))
        if Capability.TRAIN in carrier.offers - after.offers:
            leaves_graph = step.name
        carrier = after
    written = like.exports if like is not None and like.spec.exports == spec.exports else ()
    exports = plan_exports(spec, model, carrier, guessed=guessed, like=written)
    _check_exports(spec)
    _check_judged(spec)
    size = model_bytes(float_model)
    calibrates = any(p.reads_data for p in passes)
    doubts = (
        *unused_adapter(float_model.folder),
        *data_doubts(spec, float_model, samples, calibrates=calibrates),
        *unreached_weights(float_model, previews, size),
    )
    loops = turn_notes(float_model.graph()) if Capability.GRAPH in float_model.offers else ()
    return Plan(
        spec=spec,
        model=model,
        data=data,
        metric=metric,
        context=context,
        passes=tuple(passes),
        exports=tuple(exports),
        rows=layer_rows(float_model, previews, [step.layers for step in passes]),
        previews=tuple(previews),
        bytes=size,
        parameters=model_parameters(float_model),
        macs=model_macs(float_model, context.shapes),
        peak_memory=peak_memory(
            float_model, data, [(p.requests, p.blockwise, p.memory) for p in passes]
        ),
        warnings=(*_warnings(spec, passes, exports, size), *doubts, *loops),
        doubts=doubts,
        training_metric=training_metric,
    )


def _planned_before(spec: Spec, context: PassContext, like: Plan) -> int:
    """Return how many passes another plan begins with as well."""
    if context != like.context:
        return 0
    both = zip(spec.passes, like.spec.passes, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _check_judged(spec: Spec) -> None:
    """Raise ``SpecError`` for a limit that no artifact can be judged by on this machine."""
    reasons = [exporter.cannot_run for exporter in spec.exports]
    if _limits_metric(spec) and reasons and all(reasons):
        raise SpecError(
            "limits.metric-drop",
            f"cannot be judged here: {reasons[0]}",
            "add an export that can be run, such as onnx, or remove the limit",
            where=spec.where("limits", "metric-drop"),
        )


def _limits_metric(spec: Spec) -> bool:
    """Return whether the spec itself limits the drop of the metric."""
    return spec.limits.metric_drop is not None and not spec.limits.is_default("metric_drop")


def _shrinks(passes: Sequence[PassPlan], size: int) -> bool:
    return bool(passes) and passes[-1].bytes <= _SMALLER * size


def _warnings(
    spec: Spec, passes: Sequence[PassPlan], exports: Sequence[ExportPlan], size: int
) -> tuple[str, ...]:
    limited = _shrinks(passes, size) or not spec.limits.is_default("size_ratio")
    limit = spec.limits.size_ratio if limited else None
    warnings = [
        f"{e.format}: the {'estimated' if e.estimate else 'predicted'} size ratio "
        f"{e.size_ratio:.2f} is above the limit {limit:g}"
        for e in exports
        if limit is not None and e.size_ratio is not None and e.size_ratio > limit
    ]
    for e in spec.exports:
        if e.cannot_run:
            warnings.append(f"{e.format}: only its size is judged: {e.cannot_run}")
        elif e.not_judged not in ("", STORED):
            warnings.append(f"{e.format}: its latency is not judged: {e.not_judged}")
    return (*warnings, *window_doubts(spec))


def _metric(
    spec: Spec, data: Mapping[str, Data], carrier: Carrier, samples: Mapping[str, Batch]
) -> Metric | None:
    """Return the metric, which fits the model's outputs and the first target."""
    evaluation = data.get("evaluation")
    if evaluation is None:
        if _limits_metric(spec):
            raise SpecError(
                "limits.metric-drop",
                "cannot be judged without data.evaluation",
                "add data.evaluation, or remove the limit",
                where=spec.where("limits", "metric-drop"),
            )
        return None
    known = not evaluation.feeds and Capability.GRAPH in carrier.offers
    values = carrier.graph().graph.outputs if known else ()
    parts = compared_parts(carrier, evaluation)
    shapes = {v.name or "": None if v.shape is None else tuple(v.shape) for v in values}
    target, where = evaluation.target, spec.where("metric")
    numbers = any(map(single_number, with_parts(shapes, parts).values()))
    metric = resolve_metric(
        spec.metric, bool(target), spec.symbol, where, numbers=numbers, parts=parts
    )
    metric = fitted(_of_folder(metric, carrier, where), carrier.outputs)
    if _limits_metric(spec):
        place = spec.where("limits", "metric-drop")
        check_limit(spec.limits.metric_drop, metric, "limits.metric-drop", place)
    if isinstance(spec.metric, MetricKeys) and spec.metric.expect is not None:
        check_reachable(metric, spec.metric.expect, where)
    labels = None if metric.against_float or not target else samples["evaluation"].get(target)
    with located(where if labels is None else evaluation.where):
        metric.check_fit(shapes, labels, {o.name: o.dtype for o in carrier.outputs})
    return metric


def _of_folder(metric: Metric, carrier: Carrier, where: str) -> Metric:
    """Return the metric of the vectors that a model's directory describes, if it is of vectors."""
    if metric.name != "embedding" or carrier.folder is None:
        return metric
    with located(where):
        return pooled_as(metric, pooling_of(carrier.folder))


def _training_metric(spec: Spec, data: Mapping[str, Data], carrier: Carrier) -> Metric | None:
    training = data.get("training")
    if training is None or training.target is None:
        return None
    where = spec.where("metric")
    metric = _of_folder(resolve_metric(spec.metric, True, spec.symbol, where), carrier, where)
    return fitted(metric, carrier.outputs)


def _check_named(spec: Spec, index: int, carrier: Carrier) -> None:
    step = spec.passes[index]
    for reference in step.code:
        spec.symbol(reference, f"pass {step.name!r}")
    others = {
        option: open_other_model(spec, keys, option_path(index, option), carrier.inputs).carrier
        for option, keys in step.other_models.items()
    }
    if others:
        step.check_models(carrier, others)


_WIDENED = (
    "what is in half precision is in float32 from here on; inputs and outputs of the model keep "
    "their type. cast after this pass makes the rest half again"
)


def _plan_pass(
    step: Pass, carrier: Carrier, context: PassContext, data: Mapping[str, Data], leaves_graph: str
) -> tuple[PassPlan, Carrier]:
    lacking = step.lacking(carrier)
    if lacking:
        bare = Capability.GRAPH not in carrier.offers
        if not bare and Capability.RUN in lacking:
            problem, remedy = why_foreign(carrier)
            raise SpecError(f"pass {step.name!r}", f"needs run, and {problem}", remedy)
        raise SpecError(
            f"pass {step.name!r}",
            f"needs {' and '.join(sorted(lacking))}; "
            + ("a bare checkpoint" if bare else "at this point the model")
            + f" offers {', '.join(sorted(carrier.offers))} only",
            f"set {'data.calibration or ' if step.in_blocks else ''}model.factory"
            if bare
            else f"move it before {leaves_graph!r}, which leaves a graph in place of the module"
            if leaves_graph
            else "set model.factory: it works on a PyTorch module",
        )
    if not isinstance(step, WeightPass | GraphPass | TrainPass):
        raise SpecError(
            f"pass {step.name!r}",
            "is not one of the three kinds of pass",
            "derive it from WeightPass, GraphPass or TrainPass of compressor.extension",
        )
    given, carrier = carrier, step.adapted(carrier, context)
    survey = step.survey(carrier, context)
    notes = survey.notes if carrier is given else (*survey.notes, _WIDENED)
    needs = f"data {step.replays}" if step.replays else ""
    if survey.requests:
        needs = f"statistics of {len(survey.requests)} tensors"
    if needs and "calibration" not in data:
        problem = f"needs {needs}, and there is no calibration data"
        raise SpecError(f"pass {step.name!r}", problem, "add data.calibration")
    if isinstance(step, TrainPass):
        _check_training(step, data)
    empty = {r.key: make_observer(r.observer, r.options).placeholder() for r in survey.requests}
    after = step.preview(carrier, context, empty)
    plan = PassPlan(
        step.name,
        survey.layers,
        survey.requests,
        notes,
        model_bytes(after),
        step.by_block,
        step.replays or (step.replays_given if "calibration" in data else ""),
        isinstance(step, TrainPass),
        memory=survey.memory,
    )
    return plan, after


def _check_training(step: TrainPass, data: Mapping[str, Data]) -> None:
    wanted = [("training", "trains", step.labelled)]
    wanted += [("search", "chooses among what it has trained", True)] * step.searches
    for role, why, labelled in wanted:
        problem = f"{why}, and there is no {role} data"
        if role not in data:
            raise SpecError(f"pass {step.name!r}", problem, f"add data.{role}")
        if labelled and data[role].target is None:
            problem = f"needs the right answers, and data.{role} has no target"
            raise SpecError(f"pass {step.name!r}", problem, f"add target to data.{role}")


def _check_exports(spec: Spec) -> None:
    seen: set[str] = set()
    for index, exporter in enumerate(spec.exports):
        if exporter.format in seen:
            raise SpecError(
                f"exports.{index}",
                f"is a second {exporter.format!r}",
                "both would write the same file; use a second spec for it",
                where=spec.where("exports", index),
            )
        seen.add(exporter.format)
