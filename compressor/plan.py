"""Plan a spec: check everything that can be checked before heavy work, and predict the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from compressor import catalog
from compressor.data import Data, check_data, open_data
from compressor.errors import CompressorError, SpecError
from compressor.graph.costs import initializer_bytes, macs, parameters
from compressor.graph.layers import side_tensors
from compressor.graph.values import dims, value_by_name
from compressor.metrics import Metric, resolve_metric
from compressor.model import OpenedModel, open_model
from compressor.spec.load import Spec
from compressor.types.carrier import Capability, Carrier
from compressor.types.exporter import Exporter
from compressor.types.observer import Observer, Request
from compressor.types.passes import LayerPlan, Pass, PassContext

_RUNTIME_BYTES = 550_000_000  # PyTorch, ONNX Runtime and Python themselves, measured
_COPIES = 3  # the model as read, as changed, and inside the runtime


@dataclass(frozen=True)
class PassPlan:
    """What one pass will do."""

    name: str
    layers: tuple[LayerPlan, ...]
    requests: tuple[Request, ...]
    notes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ExportPlan:
    """What one exporter will write."""

    format: str
    bytes: int


@dataclass(frozen=True)
class LayerRow:
    """One row of the plan's table: a layer from the float model to the last pass."""

    name: str
    kind: str
    shape: tuple[int, ...]
    actions: tuple[str, ...]
    reasons: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Plan:
    """A spec that has been checked from end to end.

    Attributes:
        model: the float model, its weights not read yet.
        context: what passes are told about the spec.
        final: the model after all passes, with weights that mean nothing.
        bytes: of the float model's tensors.
        macs: multiply-accumulates for one sample.
        peak_memory: predicted bytes.
        warnings: limits that the prediction says will not hold, one sentence each.
    """

    spec: Spec
    model: OpenedModel
    data: Mapping[str, Data]
    metric: Metric | None
    context: PassContext
    passes: tuple[PassPlan, ...]
    exports: tuple[ExportPlan, ...]
    rows: tuple[LayerRow, ...]
    final: Carrier
    bytes: int
    parameters: int
    macs: int
    peak_memory: int
    warnings: tuple[str, ...]


def make_plan(spec: Spec) -> Plan:
    """Check a spec against its model and data, and predict what a run will do.

    Reads headers, one sample of each data source, and the model's structure.

    Raises:
        CompressorError: anything that would make the run fail, as far as it can be known.
    """
    model = open_model(spec)
    carrier = model.carrier
    if Capability.GRAPH in carrier.offers:
        with _at(spec, "model", "inputs"):
            carrier.graph()
    data = open_data(spec, carrier.inputs)
    for entry in data.values():
        check_data(entry, carrier.inputs)
    metric = _metric(spec, data)
    targets = frozenset[str]().union(*(e.targets for e in spec.exports))
    context = PassContext(spec.seed, targets)
    passes: list[PassPlan] = []
    float_model = carrier
    for index, step in enumerate(spec.passes):
        with _at(spec, "passes", index):
            plan, carrier = _plan_pass(step, carrier, context, data)
        passes.append(plan)
    exports: list[ExportPlan] = []
    for index, exporter in enumerate(spec.exports):
        with _at(spec, "exports", index):
            exporter.check(carrier)
            exports.append(ExportPlan(exporter.format, exporter.predict(carrier)))
    _check_exports(spec, spec.exports)
    graph = float_model.graph()
    return Plan(
        spec=spec,
        model=model,
        data=data,
        metric=metric,
        context=context,
        passes=tuple(passes),
        exports=tuple(exports),
        rows=_rows(float_model, carrier, passes),
        final=carrier,
        bytes=initializer_bytes(graph),
        parameters=parameters(graph),
        macs=macs(graph),
        peak_memory=_peak_memory(float_model, data, passes),
        warnings=_warnings(spec, exports, initializer_bytes(graph)),
    )


def _warnings(spec: Spec, exports: Sequence[ExportPlan], size: int) -> tuple[str, ...]:
    limit = spec.limits.size_ratio
    return tuple(
        f"{e.format}: the predicted size ratio {e.bytes / size:.2f} is above the limit {limit:g}"
        for e in exports
        if limit is not None and e.bytes > limit * size
    )


def make_observer(name: str, options: Mapping[str, Any]) -> Observer[Any, Any]:
    """Build an observer from the catalog."""
    observer: Observer[Any, Any] = catalog.load("observer", name)(**options)
    return observer


def _metric(spec: Spec, data: Mapping[str, Data]) -> Metric | None:
    evaluation = data.get("evaluation")
    if evaluation is None:
        if spec.limits.metric_drop is not None:
            raise SpecError(
                "limits.metric-drop",
                "cannot be judged without data.evaluation",
                "add data.evaluation, or remove the limit",
                where=spec.where("limits", "metric-drop"),
            )
        return None
    return resolve_metric(
        spec.metric, evaluation.target is not None, spec.folder, spec.where("metric")
    )


def _plan_pass(
    step: Pass, carrier: Carrier, context: PassContext, data: Mapping[str, Data]
) -> tuple[PassPlan, Carrier]:
    lacking = step.needs - carrier.offers
    if lacking:
        raise SpecError(
            f"pass {step.name!r}",
            f"needs {' and '.join(sorted(lacking))}; at this point the model offers "
            f"{', '.join(sorted(carrier.offers))} only",
            "move it before the passes that work on the graph, or give model.factory",
        )
    survey = step.survey(carrier, context)
    if survey.requests and "calibration" not in data:
        raise SpecError(
            f"pass {step.name!r}",
            f"needs statistics of {len(survey.requests)} tensors, and there is no calibration data",
            "add data.calibration",
        )
    placeholders = {
        r.key: make_observer(r.observer, r.options).placeholder() for r in survey.requests
    }
    after = step.preview(carrier, context, placeholders)
    size = initializer_bytes(after.graph()) if Capability.GRAPH in after.offers else 0
    return PassPlan(step.name, survey.layers, survey.requests, survey.notes, size), after


@contextmanager
def _at(spec: Spec, *path: str | int) -> Iterator[None]:
    """Give errors of the user's making their place in the spec."""
    try:
        yield
    except CompressorError as error:
        raise error.at(spec.where(*path)) from error.__cause__


def _check_exports(spec: Spec, exports: Sequence[Exporter]) -> None:
    seen: set[str] = set()
    for index, exporter in enumerate(exports):
        if exporter.format in seen:
            raise SpecError(
                f"exports.{index}",
                f"is a second {exporter.format!r}",
                "both would write the same file; use a second spec for it",
                where=spec.where("exports", index),
            )
        seen.add(exporter.format)


def _rows(before: Carrier, after: Carrier, passes: Sequence[PassPlan]) -> tuple[LayerRow, ...]:
    sizes_before, sizes_after = _layer_bytes(before), _layer_bytes(after)
    plans = [{layer.name: layer for layer in step.layers} for step in passes]
    rows = []
    for layer in before.layers():
        own = [plan.get(layer.name) for plan in plans]
        rows.append(
            LayerRow(
                name=layer.name,
                kind=layer.kind,
                shape=layer.shape,
                actions=tuple("-" if o is None else o.action for o in own),
                reasons=tuple(
                    f"{step.name}: {o.reason}"
                    for step, o in zip(passes, own, strict=True)
                    if o is not None and o.reason
                ),
                bytes_before=sizes_before[layer.name],
                bytes_after=sizes_after.get(layer.name, 0),
            )
        )
    return tuple(rows)


def _layer_bytes(carrier: Carrier) -> dict[str, int]:
    """Bytes of each layer's weight and bias with their scales and zero points."""
    initializers = carrier.graph().graph.initializers
    sizes: dict[str, int] = {}
    for layer in carrier.layers():
        names = [layer.weight, *([layer.bias] if layer.bias else [])]
        names += [s for n in list(names) for s in side_tensors(initializers[n])]
        tensors = (initializers[n].const_value for n in dict.fromkeys(names) if n in initializers)
        sizes[layer.name] = sum(t.nbytes for t in tensors if t is not None)
    return sizes


def _peak_memory(carrier: Carrier, data: Mapping[str, Data], passes: Sequence[PassPlan]) -> int:
    """Predict the bytes of anonymous memory: runtime, copies of the model, one batch's tensors."""
    graph = carrier.graph()
    batch = max((d.batch for d in data.values()), default=1)
    values = value_by_name(graph)
    observed = 0
    for step in passes:
        tensors = {t for r in step.requests for t in r.tensors}
        shapes = (dims(values[t]) for t in tensors if t in values)
        observed = max(observed, sum(prod(s) for s in shapes if s) * 4 * batch)
    return _RUNTIME_BYTES + _COPIES * initializer_bytes(graph) + 2 * observed
