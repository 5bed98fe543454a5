"""``model.engine.json``: what an engine was built from, with what, and what it consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from compressor.exporters.tensorrt.building import Settings
from compressor.exporters.tensorrt.layer_report import EngineLayer, EngineTensor
from compressor.exporters.tensorrt.placement import Placed
from compressor.types.tensors import TensorSpec

SCHEMA = 1
KIND = "tensorrt-engine"


@dataclass(frozen=True)
class Origin:
    """Where an engine comes from.

    Attributes:
        name: the spec's name.
        spec: hash of the resolved spec.
        onnx: sha256 of each ONNX file that it was built from, by name.
        builder: ``rtx`` or ``gpu``.
        versions: of the builder's package, and the GPU where the engine is made for that.
        inputs: what the engine takes.
        outputs: what it gives.
    """

    name: str
    spec: str
    onnx: Mapping[str, str]
    builder: str
    versions: Mapping[str, str]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]


def engine_manifest(
    origin: Origin,
    settings: Settings,
    layers: Sequence[EngineLayer],
    placed: Sequence[Placed],
    plan: bytes,
) -> dict[str, Any]:
    """Return the document; nothing in it differs between equal builds.

    Args:
        origin: where the engine comes from.
        settings: what it was built with.
        layers: what it consists of.
        placed: what it made of layers with quantized weights.
        plan: the engine.
    """
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "name": origin.name,
        "spec": origin.spec,
        "engine": {"bytes": len(plan), "sha256": sha256(plan).hexdigest()},
        "onnx": dict(origin.onnx),
        "builder": origin.builder,
        "versions": dict(origin.versions),
        "compute_capabilities": list(settings.capabilities) or None,
        "flags": list(settings.flags),
        "hardware_compatibility": settings.hardware or None,
        "profiles": {name: asdict(profile) for name, profile in settings.profiles.items()},
        "inputs": [str(spec) for spec in origin.inputs],
        "outputs": [str(spec) for spec in origin.outputs],
        "layers": [_layer(layer) for layer in layers],
        "quantized": [
            {
                "layer": entry.meant.layer,
                "node": entry.meant.node,
                "stored": entry.meant.stored,
                "meant": entry.meant.computed or None,
                "computed": entry.found or None,
            }
            for entry in placed
        ],
    }


def _layer(layer: EngineLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "type": layer.type,
        "precision": layer.precision or None,
        "nodes": list(layer.nodes),
        "inputs": [_tensor(tensor) for tensor in layer.inputs],
        "constants": [_tensor(tensor) for tensor in layer.constants],
        "outputs": [_tensor(tensor) for tensor in layer.outputs],
    }


def _tensor(tensor: EngineTensor) -> str:
    return f"{tensor.dtype}[{', '.join('?' if d < 0 else str(d) for d in tensor.shape)}]"
