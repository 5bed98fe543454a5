"""Runs files and modules, and compares what they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from compressor.types.tensors import Array, Batch

_EXACT_DB = 200.0
_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


def opened(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def outputs_of(module: torch.nn.Module, batch: Batch) -> list[Array]:
    with torch.inference_mode():
        result = module(*(torch.from_numpy(a) for a in batch.values()))
    return leaves(result)


def named_outputs(module: torch.nn.Module, batch: Batch) -> list[Array]:
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    with torch.inference_mode():
        result = module(**{k: torch.from_numpy(a) for k, a in batch.items()}, return_dict=True)
    return leaves({k: v for k, v in result.items() if k != "past_key_values"})


def leaves(result: Any) -> list[Array]:
    found = torch.utils._pytree.tree_leaves(result)
    return [t.detach().numpy() for t in found if isinstance(t, torch.Tensor)]


def error_db(wanted: Sequence[Array], got: Sequence[Array]) -> float:
    """Return signal over error of the worst output, in dB.

    Raises:
        AssertionError: there are other outputs, or one of another shape.
    """
    assert len(wanted) == len(got), f"{len(got)} outputs for {len(wanted)}"
    worst = _EXACT_DB
    for want, have in zip(wanted, got, strict=True):
        assert want.shape == have.shape, f"shape {have.shape} for {want.shape}"
        a, b = want.astype(np.float64), have.astype(np.float64)
        signal, error = float((a * a).sum()), float(((a - b) ** 2).sum())
        if not np.isfinite(error):
            return -_EXACT_DB
        if error and signal:
            worst = min(worst, 10 * float(np.log10(signal / error)))
    return round(worst, 1)


def rounded_tensors(path: Path) -> int:
    """Return how many tensors of an ONNX file are rounded to 8 bits."""
    count = 0
    for graph in _graphs(onnx.load(path, load_external_data=False).graph):
        weights = [t for t in graph.initializer if t.data_type in _BYTES and len(t.dims) > 1]
        kinds = [node.op_type for node in graph.node]
        count += len(weights) + sum(k.startswith(("Quantize", "DynamicQuantize")) for k in kinds)
    return count


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
