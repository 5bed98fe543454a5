"""What a model consists of: its layers in order with what they cost, and a file byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compressor.graph.costs import (
    Sample,
    at_lengths,
    initializer_bytes,
    node_macs,
    node_traffic,
    side_bytes,
)
from compressor.graph.layers import layer_of
from compressor.models.onnx.file import read_onnx
from compressor.types.carrier import Capability, Carrier

_FLOPS_PER_BYTE = 16.0  # of a present CPU's float32 arithmetic and memory
_INTEGER_SPEEDUP = 4.0
_MOST_LINKS = 8
ASSUMPTION = (
    "predicted from operations and bytes at batch 1, for a machine that computes 16 float32 "
    "operations in the time of a byte, and four times as many of int8"
)


def layer_graph(carrier: Carrier, sample: Sample) -> dict[str, Any] | None:
    """Return the entry of ``report.json`` on the layers in the order of execution.

    For each layer: which earlier ones it reads from (through whatever lies between), its
    multiply-accumulates and bytes for one sample, and its share of the time of all layers.
    ``None`` for a model without a graph.

    Args:
        sample: shapes of inputs, by name; open axes of others count as 1.
    """
    if Capability.GRAPH not in carrier.offers:
        return None
    layers: list[dict[str, Any]] = []
    seconds: list[float] = []
    sources: dict[str, list[int]] = {}
    for node in at_lengths(carrier.graph(), sample).graph:
        reads = [i for v in node.inputs if v is not None for i in sources.get(v.name or "", ())]
        reads = sorted(set(reads))[-_MOST_LINKS:]
        layer = layer_of(node)
        if layer is not None:
            macs, traffic = node_macs(node), node_traffic(node)
            moved = 0.0 if traffic is None else traffic.bytes
            peak = _INTEGER_SPEEDUP if traffic is not None and traffic.integer else 1.0
            seconds.append(max(2.0 * macs / (_FLOPS_PER_BYTE * peak), moved))
            layers.append(
                {
                    "name": layer.name,
                    "operator": node.op_type,
                    "reads": reads,
                    "macs": macs,
                    "bytes": round(moved),
                }
            )
            reads = [len(layers) - 1]
        sources.update({value.name: reads for value in node.outputs if value.name})
    whole = sum(seconds)
    for entry, part in zip(layers, seconds, strict=True):
        entry["time_share"] = 100.0 * part / whole if whole > 0 else None
    return {"layers": layers, "time_basis": ASSUMPTION}


def file_contents(path: Path, form: str, size: int) -> Mapping[str, int] | None:
    """Return the bytes of an ONNX file's weights, of scales and zero points, and of its graph.

    Args:
        form: the artifact's format.
        size: bytes of all its files.
    """
    if form != "onnx":
        return None
    model: ir.Model = read_onnx(path)
    scales = side_bytes(model)
    weights = initializer_bytes(model) - scales
    return {"weights": weights, "scales": scales, "graph": max(0, size - weights - scales)}
