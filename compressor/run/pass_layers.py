"""What ``report.json`` tells of each layer after a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compressor.graph.codebooks import codebook_of
from compressor.graph.costs import layer_bytes
from compressor.run.evaluate import layer_signals
from compressor.run.workspace import Workspace
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer
from compressor.types.passes import Outcome
from compressor.types.tensors import Batch


def layer_entries(
    workspace: Workspace,
    outcome: Outcome,
    after: Carrier,
    batches: Sequence[Batch] | None,
    reference: Carrier,
) -> list[dict[str, Any]]:
    """Describe every layer after a pass: scheme, sparsity, weight and output SQNR.

    Args:
        batches: what both models are run on, if they can be run.
        reference: what outputs are compared with.
    """
    done = {layer.name: layer for layer in outcome.layers}
    signals: Mapping[str, float | None] = {}
    if batches is not None:
        signals = layer_signals(after, reference, batches)
    sizes, old_sizes = layer_bytes(after), layer_bytes(workspace.plan.model.carrier)
    rows: list[dict[str, Any]] = []
    for layer in after.layers():
        done_here = done.get(layer.name)
        rows.append(
            {
                "name": layer.name,
                "kind": layer.kind,
                "shape": list(layer.shape),
                "scheme": done_here.scheme if done_here else str(np.dtype(layer.dtype).name),
                # To count the zeros of a streamed model is to read all of it.
                "sparsity": None if batches is None else _sparsity(after, layer),
                "sqnr_db": signals.get(layer.name),
                "weight_sqnr_db": done_here.weight_sqnr_db if done_here else None,
                "details": dict(done_here.details) if done_here else {},
                "bytes_before": old_sizes.get(layer.name),
                "bytes": sizes[layer.name],
            }
        )
        if layer.name not in old_sizes:
            rows[-1]["bytes_before_reason"] = "the float model has no such layer"
    return rows


def _sparsity(carrier: Carrier, layer: Layer) -> float:
    weight = carrier.weight(layer)
    stored = carrier.graph().graph.initializers.get(layer.weight)
    book = None if stored is None else codebook_of(stored)
    if book is not None:
        zeros = int((weight == torch.from_numpy(book.zero_codes())).sum())
        return 100.0 * zeros / max(weight.numel(), 1)
    if weight.is_floating_point() and weight.itemsize == 1:
        weight = weight.to(torch.float32)  # nothing is counted in 8-bit floats
    zeros = weight.numel() - int(torch.count_nonzero(weight))
    return 100.0 * zeros / max(weight.numel(), 1)


def weakest_layer(layers: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the layer after which the signal is worst, or ``None`` if none lost anything."""
    lossy = [layer for layer in layers if layer["sqnr_db"] is not None]
    if not lossy:
        return None
    worst = min(lossy, key=lambda layer: float(layer["sqnr_db"]))
    return {"name": worst["name"], "sqnr_db": worst["sqnr_db"]}
