"""Run the passes in order, each at most once for the same content."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compressor import catalog
from compressor.errors import CompressorError
from compressor.evaluate import layer_signals
from compressor.graph.costs import initializer_bytes
from compressor.plan import make_observer
from compressor.run.workspace import Workspace
from compressor.store import result_key
from compressor.types.carrier import Carrier
from compressor.types.observer import Request
from compressor.types.passes import Outcome, Pass

_MODEL = "model"
_SIGNAL_SAMPLES = 64


@dataclass(frozen=True)
class Step:
    """A finished pass.

    Attributes:
        name: the pass.
        key: key of the model after it.
        carrier: the model after it.
        result: seconds, bytes, layers and notes, as JSON.
        cached: it was finished by an earlier run.
    """

    name: str
    key: str
    carrier: Carrier
    result: Mapping[str, Any]
    cached: bool


def run_passes(workspace: Workspace) -> list[Step]:
    """Run every pass, or take its result from the store.

    Raises:
        CompressorError: a pass fails; what finished before it is kept.
    """
    steps: list[Step] = []
    plan = workspace.plan
    key, carrier = workspace.source_key, plan.model.carrier
    for index, (declared, planned) in enumerate(zip(plan.spec.passes, plan.passes, strict=True)):
        data = plan.data["calibration"].digest if planned.requests else None
        key = result_key(
            "pass",
            key,
            name=declared.name,
            version=declared.version,
            options=declared.model_dump(mode="json"),
            data=data,
            batch=plan.data["calibration"].batch if planned.requests else None,
            seed=plan.spec.seed,
            targets=sorted(plan.context.targets),
        )
        try:
            step = _step(workspace, declared, key, carrier)
        except CompressorError as error:
            raise error.at(plan.spec.where("passes", index)) from error.__cause__
        steps.append(step)
        carrier = step.carrier
    return steps


def _step(workspace: Workspace, declared: Pass, key: str, carrier: Carrier) -> Step:
    found = workspace.store.read(key)
    if found is not None:
        restored = workspace.plan.model.carrier.restore(workspace.store.folder(key) / _MODEL)
        return Step(declared.name, key, restored, found, cached=True)
    workspace.load()
    start = time.perf_counter()
    torch.manual_seed(workspace.plan.spec.seed)
    survey = declared.survey(carrier, workspace.plan.context)
    statistics = _collect(workspace, declared.name, carrier, survey.requests)
    with workspace.progress.stage(declared.name):
        outcome = declared.apply(carrier, workspace.plan.context, statistics)
    seconds = time.perf_counter() - start
    with workspace.store.write(key) as (folder, result):
        (folder / _MODEL).mkdir()
        outcome.carrier.save(folder / _MODEL)
        restored = workspace.plan.model.carrier.restore(folder / _MODEL)
        result.update(
            seconds=seconds,
            bytes=initializer_bytes(restored.graph()),
            layers=_layers(workspace, outcome, restored),
            notes=list(dict.fromkeys([*survey.notes, *outcome.notes])),
        )
    restored = workspace.plan.model.carrier.restore(workspace.store.folder(key) / _MODEL)
    return Step(declared.name, key, restored, result, cached=False)


def _collect(
    workspace: Workspace, label: str, carrier: Carrier, requests: tuple[Request, ...]
) -> dict[str, Any]:
    """Gather the statistics that a pass asked for, in one pass over the calibration data."""
    if not requests:
        return {}
    data = workspace.plan.data["calibration"]
    taps = list(dict.fromkeys(t for r in requests for t in r.tensors))
    inputs = {i.name for i in carrier.inputs}
    runner = carrier.runner([t for t in taps if t not in inputs])
    with workspace.progress.stage(f"{label}: calibrate", data.samples) as advance:
        collected: dict[str, Any] = catalog.resolve(catalog.COLLECT)(
            lambda batch: {**batch, **runner.run(batch)},
            data.batches(),
            requests,
            make_observer,
            advance,
        )
    return collected


def _layers(workspace: Workspace, outcome: Outcome, after: Carrier) -> list[dict[str, Any]]:
    """Describe every layer after a pass: scheme, sparsity, weight and output SQNR."""
    done = {layer.name: layer for layer in outcome.layers}
    signals = layer_signals(after, workspace.baseline, workspace.sample(_SIGNAL_SAMPLES))
    rows = []
    for layer in after.layers():
        own = done.get(layer.name)
        weight = after.weight(layer)
        zeros = weight.numel() - int(torch.count_nonzero(weight))
        rows.append(
            {
                "name": layer.name,
                "kind": layer.kind,
                "shape": list(layer.shape),
                "scheme": own.scheme if own else str(np.dtype(layer.dtype).name),
                "sparsity": 100.0 * zeros / max(weight.numel(), 1),
                "sqnr_db": signals.get(layer.name),
                "weight_sqnr_db": own.weight_sqnr_db if own else None,
                "details": dict(own.details) if own else {},
            }
        )
    return rows


def weakest_layer(layers: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the layer after which the signal is worst, or ``None`` if none lost anything."""
    lossy = [layer for layer in layers if layer["sqnr_db"] is not None]
    if not lossy:
        return None
    worst = min(lossy, key=lambda layer: float(layer["sqnr_db"]))
    return {"name": worst["name"], "sqnr_db": worst["sqnr_db"]}
