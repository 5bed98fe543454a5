"""Why a model cannot be run, for messages."""

from __future__ import annotations

from compressor.types.carrier import Capability, Carrier


def cannot_run(carrier: Carrier) -> str:
    """Say why there is nothing to run; only for models that offer no ``run``."""
    if Capability.GRAPH not in carrier.offers:
        return "a bare checkpoint has no graph and cannot be run"
    return "it has operators that ONNX Runtime does not know and cannot be run"
