"""How much noise a pass added to each layer, and how many bytes each layer saves.

Training changes layers on purpose. So passes after a training are compared with the trained model
instead of the float one; where channels were scaled, with that model's channels scaled alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from compressor.errors import DataError, ModelError
from compressor.graph.costs import layer_bytes
from compressor.run.metrics.metric_effect import MetricEffect
from compressor.run.noise.noise import ModelNoise, Noise, measured_noise
from compressor.run.noise.references import Reference
from compressor.run.noise.signals import ratio_db
from compressor.run.pipeline import FUSE, Step
from compressor.run.store import result_key
from compressor.run.verdicts.verdicts import same_function
from compressor.run.workspace import Workspace, metric_code
from compressor.types.layer_rules import rule_class
from compressor.types.tensors import samples_in

_SAMPLES = 16
_VERSION = 13
Basis = Literal["outputs", "layers", "weights"]


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
    effect = _effect(workspace, 1) if basis == "outputs" else None
    return {
        "basis": basis,
        "reason": noises.reason or None,
        "shared_inputs": 100.0 * shared / whole if whole > 0 else None,
        "metric_basis": None if effect is None else effect.basis,
        "shared_metric_noise": sum(noise.effect or 0.0 for noise in noises.values.values()),
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
    noises = _stored_noise(workspace, steps, index)
    if _adds_noise(workspace, steps, index):
        noises = noises.less(_stored_noise(workspace, steps, index - 1))
    touched = {row["name"] for row in layers}
    touched_noise = {name: noise for name, noise in noises.layers.items() if name in touched}
    if all(n.reached is not None for n in (*touched_noise.values(), *noises.values.values())):
        return "outputs", replace(noises, layers=touched_noise)
    left = {
        name: replace(noise, reached=None, effect=None) for name, noise in touched_noise.items()
    }
    return "layers", ModelNoise(left, {}, noises.reason)


def _adds_noise(workspace: Workspace, steps: Sequence[Step], index: int) -> bool:
    """Return whether the model before a pass has noise, relative to what the pass's has it to."""
    reference = _reference(workspace, steps, index)
    if not index or workspace.plan.passes[index - 1].trains:
        return False
    if reference is not None and reference.given and reference is not steps[index - 1].reference:
        return False
    return not (index == 1 and _only_rounds(steps[0]))


def _reference(workspace: Workspace, steps: Sequence[Step], index: int) -> Reference | None:
    """Return what layers after a pass are compared with; ``None`` for the float model."""
    for i in range(index, -1, -1):
        if steps[i].reference is not (steps[i - 1].reference if i else None):
            return steps[i].reference
        if i and workspace.plan.passes[i - 1].trains:
            return Reference(steps[i - 1].key, steps[i - 1].carrier)
    return None


def _only_rounds(step: Step) -> bool:
    """Whether a float model differs from the one before by the rounding of float32 alone."""
    signals = [row["sqnr_db"] for row in step.result["layers"]]
    return step.name == FUSE and all(map(same_function, signals))


def _stored_noise(workspace: Workspace, steps: Sequence[Step], index: int) -> ModelNoise:
    """Return the noise of the model after a pass."""
    step, reference = steps[index], _reference(workspace, steps, index)
    metric = workspace.plan.metric
    key = result_key(
        "attribution",
        step.key,
        baseline=workspace.source_key if reference is None else reference.key,
        data={role: data.digest for role, data in workspace.plan.data.items()},
        metric=None
        if metric is None
        else [metric.name, metric_code(metric), metric.higher_is_better],
        version=_VERSION,
    )
    stored = workspace.store.read(key)
    if stored is None:
        with workspace.progress.stage("attribute noise to layers"):
            try:
                exact = workspace.baseline if reference is None else reference.carrier
                batches = workspace.looked_at(_SAMPLES)  # a fixed batch may hold more
                noises = measured_noise(
                    step.carrier,
                    exact,
                    batches,
                    _effect(workspace, sum(map(samples_in, batches))),
                    workspace.output_parts,
                )
            except (ModelError, DataError) as error:  # a missing explanation does not fail a run
                noises = ModelNoise({}, {}, str(error))
        workspace.store.keep(key, asdict(noises))
        return noises
    layers, values = stored["layers"], stored["values"]
    return ModelNoise(
        {name: Noise(**noise) for name, noise in layers.items()},
        {name: Noise(**noise) for name, noise in values.items()},
        str(stored["reason"]),
    )


def _effect(workspace: Workspace, samples: int) -> MetricEffect | None:
    """Return how the noise of the first samples, so many, changes the metric."""
    metric = workspace.plan.metric
    if metric is None or workspace.evaluation is None:
        return None
    if workspace.evaluation.feeds:  # probes may be single steps, which have no target
        built_in = metric.code is None and (metric.about_classes or metric.against_float)
        return MetricEffect(metric, None) if built_in else None
    return MetricEffect(metric, None if metric.against_float else workspace.targets(samples))


def noise_of_row(row: Mapping[str, Any]) -> float:
    """Return the power of a layer's noise where it goes, the output's signal being 1."""
    decibels = row["own_sqnr_db"] if row["output_sqnr_db"] is None else row["output_sqnr_db"]
    return 0.0 if decibels is None else 10.0 ** (-float(decibels) / 10.0)


def _facts(noise: Noise, whole: float) -> dict[str, float | None]:
    is_known = noise.own is not None and whole > 0
    share = noise.counted / whole if is_known else 0.0
    return {
        "own_sqnr_db": None if noise.whole is None else ratio_db(1.0, noise.whole),
        "output_sqnr_db": None if noise.reached is None else ratio_db(1.0, noise.reached),
        "noise_share": 100.0 * share if is_known else None,
        # With a share of 1 no noise would be left, which is no finite gain.
        "predicted_gain_db": -10.0 * math.log10(1.0 - share) if is_known and share < 1 else None,
        "metric_noise": noise.effect,
    }
