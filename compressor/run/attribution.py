"""How much noise a pass added to each layer, and how many bytes each layer saves.

Every layer is run alone on its float input, so that noise of earlier layers does not count. Then
the float model is run with that one layer's error added to its output, which shows how much of it
reaches the model's output. That takes one run of a few samples for each layer.

A value that several nodes read stays quantized when one of them is left out. So its noise is not
attributed to any layer, but counted separately.

Training changes layers on purpose. So passes after a training are compared with the trained model
instead of the float one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np

from compressor.errors import DataError, ModelError
from compressor.graph.blocks import Cut, cut_at, isolated, main_values, with_offsets
from compressor.graph.costs import layer_bytes, macs
from compressor.models.onnx.ort_runner import runner_of
from compressor.run.evaluate import ratio_db, signal_and_error
from compressor.run.felt_noise import Feeling
from compressor.run.pipeline import Step
from compressor.run.store import result_key
from compressor.run.workspace import Workspace, metric_code
from compressor.types.carrier import Carrier
from compressor.types.layer_rules import rule_class
from compressor.types.tensors import Array, Batch

_SAMPLES = 16
_MOST_MACS = 2e11  # some seconds of a core
_VERSION = 5
Basis = Literal["outputs", "layers", "weights"]


@dataclass(frozen=True)
class Noise:
    """Noise-to-signal ratios of powers; ``None`` where one is not known.

    Attributes:
        whole: of a layer's output (of its weight if the model cannot be run).
        own: the same without the noise of a value that others read, too.
        reached: of the model's output, if only ``own`` is added.
        felt: how much of that the metric feels, a mean over samples.
    """

    whole: float | None = None
    own: float | None = None
    reached: float | None = None
    felt: float | None = None

    @property
    def counted(self) -> float:
        """The ratio by which layers are compared."""
        return (self.own if self.reached is None else self.reached) or 0.0

    def less(self, other: Noise) -> Noise:
        """Return this noise minus the noise that was there before."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Noise(
            *(None if mine is None else max(0.0, mine - (theirs or 0.0)) for mine, theirs in pairs)
        )


@dataclass(frozen=True)
class ModelNoise:
    """The noise of a model's layers, by name, and of values that several nodes read.

    ``reason`` is why nothing is known, if the runtime refused parts of the model.
    """

    layers: Mapping[str, Noise]
    values: Mapping[str, Noise]
    reason: str = ""

    def less(self, other: ModelNoise) -> ModelNoise:
        """Return this noise minus the noise that was there before."""
        return ModelNoise(
            {n: noise.less(other.layers.get(n, Noise())) for n, noise in self.layers.items()},
            {n: noise.less(other.values.get(n, Noise())) for n, noise in self.values.items()},
            self.reason or other.reason,
        )


def attribution(workspace: Workspace, index: int, steps: Sequence[Step]) -> dict[str, Any] | None:
    """Return the entry of ``report.json`` on the layers that a pass changed.

    ``None`` for a pass that trains, or has no rules to leave single layers out.
    """
    declared, plans = workspace.plan.spec.passes[index], workspace.plan.passes
    if rule_class(type(declared)) is None or plans[index].trains:
        return None
    before, step = steps[index - 1] if index else None, steps[index]
    touched = [row.name for row in workspace.plan.passes[index].layers if row.touched]
    earlier = workspace.plan.model.carrier if before is None else before.carrier
    sizes = [layer_bytes(earlier), layer_bytes(step.carrier)]
    layers = [row for row in step.result["layers"] if row["name"] in set(touched)]
    basis, noises = _noise(workspace, index, steps, layers)
    shared = sum(noise.counted for noise in noises.values.values())
    whole = shared + sum(noise.counted for noise in noises.layers.values())
    feeling = _feeling(workspace) if basis == "outputs" else None
    return {
        "basis": basis,
        "reason": noises.reason or None,
        "shared_inputs": 100.0 * shared / whole if whole > 0 else None,
        "metric_basis": None if feeling is None else feeling.by,
        "shared_metric_noise": sum(noise.felt or 0.0 for noise in noises.values.values()),
        "layers": [
            {
                "name": row["name"],
                "scheme": row["scheme"],
                "bytes_to_skip": sizes[0].get(row["name"], 0) - sizes[1].get(row["name"], 0),
                **_facts(noises.layers.get(row["name"], Noise()), whole),
            }
            for row in layers
        ],
    }


def _noise(
    workspace: Workspace,
    index: int,
    steps: Sequence[Step],
    layers: Sequence[Mapping[str, Any]],
) -> tuple[Basis, ModelNoise]:
    """Return the noise that the pass adds to each layer, and where it is measured."""
    if not workspace.runs:
        weight_sqnr = {str(row["name"]): row["weight_sqnr_db"] for row in layers}
        ratios = {
            n: None if db is None else 10 ** (-float(db) / 10) for n, db in weight_sqnr.items()
        }
        return "weights", ModelNoise({n: Noise(ratio, ratio) for n, ratio in ratios.items()}, {})
    trained = [i for i in range(index) if workspace.plan.passes[i].trains]
    reference = steps[trained[-1]] if trained else None
    noises = _stored_noise(workspace, steps[index], reference)
    if index and steps[index - 1] is not reference:
        noises = noises.less(_stored_noise(workspace, steps[index - 1], reference))
    touched = {row["name"] for row in layers}
    touched_noise = {name: noise for name, noise in noises.layers.items() if name in touched}
    if all(n.reached is not None for n in (*touched_noise.values(), *noises.values.values())):
        return "outputs", replace(noises, layers=touched_noise)
    left = {name: replace(noise, reached=None, felt=None) for name, noise in touched_noise.items()}
    return "layers", ModelNoise(left, {}, noises.reason)


def _stored_noise(workspace: Workspace, step: Step, reference: Step | None) -> ModelNoise:
    """Return a model's noise relative to a reference, the float model by default."""
    metric = workspace.plan.metric
    key = result_key(
        "attribution",
        step.key,
        baseline=workspace.source_key if reference is None else reference.key,
        data={role: data.digest for role, data in workspace.plan.data.items()},
        metric=None if metric is None else [metric.name, metric_code(metric)],
        version=_VERSION,
    )
    stored = workspace.store.read(key)
    if stored is None:
        with workspace.progress.stage("attribute noise to layers"):
            try:
                exact = workspace.baseline if reference is None else reference.carrier
                noises = measured_noise(
                    step.carrier, exact, workspace.sample(_SAMPLES), _feeling(workspace)
                )
            except (ModelError, DataError) as error:  # a missing explanation does not fail a run
                noises = ModelNoise({}, {}, str(error))
        with workspace.store.write(key) as (_, result):
            result.update(asdict(noises))
        return noises
    layers, values = stored["layers"], stored["values"]
    return ModelNoise(
        {name: Noise(**noise) for name, noise in layers.items()},
        {name: Noise(**noise) for name, noise in values.items()},
        str(stored["reason"]),
    )


def _feeling(workspace: Workspace) -> Feeling | None:
    metric = workspace.plan.metric
    if metric is None or workspace.evaluation is None:
        return None
    return Feeling(metric, None if metric.against_float else workspace.targets(_SAMPLES))


def measured_noise(
    carrier: Carrier, baseline: Carrier, batch: Batch, feeling: Feeling | None = None
) -> ModelNoise:
    """Return each layer's noise on its float input.

    How much of it reaches the output is omitted if that would take long. Layers that do not have
    the same shape in both models are omitted.
    """
    shapes = {layer.name: layer.shape for layer in baseline.layers()}
    same = [layer for layer in carrier.layers() if shapes.get(layer.name) == layer.shape]
    alone = isolated(carrier.graph(), same, main_values(baseline.graph()))
    if not alone.layers:
        return ModelNoise({}, {})
    input_names = {i.name for i in baseline.inputs}
    outputs = [layer.output for layer in alone.layers]
    taps = dict.fromkeys([*alone.cut.inputs, *outputs])
    exact = {**batch, **baseline.runner([t for t in taps if t not in input_names]).run(batch)}
    have = _run(alone.cut, exact)
    rounded = {name: have[form] for name, form in alone.shared.items()}
    # The float layers' outputs for the rounded values that others read, too.
    want = _run(cut_at(baseline.graph(), list(alone.cut.inputs), outputs), {**exact, **rounded})
    errors = [
        _Error(layer.name, layer.output, have[layer.output] - want[layer.output])
        for layer in alone.layers
        if _comparable(want[layer.output], have[layer.output])
    ]
    inputs = [
        _Error(name, name, have[form] - exact[name])
        for name, form in alone.shared.items()
        if name not in input_names and _comparable(exact[name], have[form])
    ]
    few = _affordable(baseline, batch, len(errors) + len(inputs))
    found = {} if few is None else _reached(baseline, few, [*errors, *inputs], feeling)
    layers = {
        e.name: Noise(
            _ratio([exact[e.value]], [have[e.value]]),
            _ratio([exact[e.value]], [exact[e.value] + e.values]),
            *found.get(e, (None, None)),
        )
        for e in errors
    }
    values = {e.name: Noise(None, None, *found.get(e, (None, None))) for e in inputs}
    return ModelNoise(layers, values)


@dataclass(frozen=True, eq=False)
class _Error:
    """An error to add to a value of the float model.

    Attributes:
        name: the layer, or the value itself.
        value: the value that the error is of.
        values: the error, in the value's shape.
    """

    name: str
    value: str
    values: Array


def _run(cut: Cut, exact: Batch) -> Batch:
    dtypes = {v.name: v.dtype for v in cut.model.graph.inputs}
    feed = dict(exact)
    for value, entry in cut.inputs.items():
        dtype = dtypes[entry]
        feed[entry] = exact[value] if dtype is None else exact[value].astype(dtype.numpy())
    return runner_of(cut.model, ()).run(feed)


def _affordable(baseline: Carrier, batch: Batch, layers: int) -> Batch | None:
    """Return as many samples as can be run once for each layer; ``None`` if not even one."""
    first = baseline.inputs[0]
    counted = prod(d if isinstance(d, int) else 1 for d in first.shape)
    work = macs(baseline.graph()) * batch[first.name].size / max(counted, 1) * layers
    size = len(batch[first.name])
    if work <= _MOST_MACS:
        return batch
    fewer = int(size * _MOST_MACS / work)
    if fewer < 1 or isinstance(first.shape[0], int):
        return None
    return {name: array[:fewer] for name, array in batch.items()}


def _reached(
    baseline: Carrier, batch: Batch, errors: Sequence[_Error], feeling: Feeling | None
) -> dict[_Error, tuple[float | None, float | None]]:
    """Return for each error how much of it reaches the outputs, and what the metric feels of it."""
    values = list(dict.fromkeys(error.value for error in errors))
    model, offsets = with_offsets(baseline.graph(), values)
    runner = runner_of(model, ())
    size = len(next(iter(batch.values())))
    errors = [error for error in errors if error.value in offsets]
    none: Batch = {offsets[e.value]: np.zeros(1, e.values.dtype) for e in errors}
    exact = runner.run({**batch, **none})
    feels = None if feeling is None else feeling.relative_to(exact)
    reached: dict[_Error, tuple[float | None, float | None]] = {}
    for error in errors:
        # A first axis that is not the batch is not cut: no samples were dropped then.
        part = error.values[:size]
        noisy = runner.run({**batch, **none, offsets[error.value]: part})
        felt = None if feels is None else feels(noisy) / size
        reached[error] = _ratio(list(exact.values()), list(noisy.values())), felt
    return reached


def _comparable(want: Array, have: Array) -> bool:
    return bool(want.shape == have.shape and np.isfinite(want).all() and np.isfinite(have).all())


def _ratio(want: Sequence[Array], have: Sequence[Array]) -> float | None:
    signal, error = signal_and_error(want, have)
    return error / signal if signal > 0 and math.isfinite(error) else None


def _facts(noise: Noise, whole: float) -> dict[str, float | None]:
    is_known = noise.own is not None and whole > 0
    share = noise.counted / whole if is_known else 0.0
    return {
        "own_sqnr_db": None if noise.whole is None else ratio_db(1.0, noise.whole),
        "output_sqnr_db": None if noise.reached is None else ratio_db(1.0, noise.reached),
        "noise_share": 100.0 * share if is_known else None,
        # With a share of 1 no noise would be left, which is no finite gain.
        "predicted_gain_db": -10.0 * math.log10(1.0 - share) if is_known and share < 1 else None,
        "metric_noise": noise.felt,
    }
