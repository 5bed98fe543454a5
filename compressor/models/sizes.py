"""Sizes of a model, and what it cannot do."""

from __future__ import annotations

from compressor.graph.costs import initializer_bytes, macs, parameters
from compressor.graph.layers import side_tensors
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer


def model_bytes(carrier: Carrier) -> int:
    """Bytes of all tensors; codes are packed."""
    if Capability.GRAPH in carrier.offers:
        return initializer_bytes(carrier.graph())
    return sum(tensor.nbytes for tensor in carrier.tensors().values())


def model_parameters(carrier: Carrier) -> int:
    """Number of weights."""
    if Capability.GRAPH in carrier.offers:
        return parameters(carrier.graph())
    floating = (t for t in carrier.tensors().values() if t.dtype.is_floating_point)
    return sum(tensor.elements for tensor in floating)


def model_macs(carrier: Carrier) -> int | None:
    """Multiply-accumulates for one sample; ``None`` where no graph says how weights are used."""
    return macs(carrier.graph()) if Capability.GRAPH in carrier.offers else None


def layer_bytes(carrier: Carrier) -> dict[str, int]:
    """Bytes of each layer's weight and bias with their scales and zero points, by layer."""
    if Capability.GRAPH not in carrier.offers:
        stored = carrier.tensors()
        return {
            layer.name: sum(stored[n].nbytes for n in _parameters(layer) if n in stored)
            for layer in carrier.layers()
        }
    initializers = carrier.graph().graph.initializers
    sizes: dict[str, int] = {}
    for layer in carrier.layers():
        names = _parameters(layer)
        names += [s for n in list(names) for s in side_tensors(initializers[n])]
        values = (initializers[n].const_value for n in dict.fromkeys(names) if n in initializers)
        sizes[layer.name] = sum(t.nbytes for t in values if t is not None)
    return sizes


def _parameters(layer: Layer) -> list[str]:
    return [layer.weight, *([layer.bias] if layer.bias else [])]


def cannot_run(carrier: Carrier) -> str:
    """Say why there is nothing to run; only for models that offer no ``run``."""
    if Capability.GRAPH not in carrier.offers:
        return "a bare checkpoint has no graph and cannot be run"
    return "it has operators that ONNX Runtime does not know and cannot be run"
