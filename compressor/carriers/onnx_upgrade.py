"""Bring ONNX files of older opsets to the one that passes are written for."""

from __future__ import annotations

import onnx_ir as ir

from compressor.errors import ModelError
from compressor.graph.opset_conversion import converted
from compressor.progress import quiet_libraries

_OLDEST_OF_ONNXSCRIPT = 18  # its converter works in memory; older opsets need the onnx package's


def upgraded(model: ir.Model, opset: int, subject: str) -> ir.Model:
    """Return a graph of at least an opset; names of inputs, outputs and axes stay.

    Args:
        model: the graph; may be changed.
        opset: graphs of a newer one stay as they are.
        subject: what the model is, for messages.

    Raises:
        ModelError: an operator has no form in the newer opset.
    """
    have = model.opset_imports.get("")
    if have is None:  # all operators are of other domains
        model.opset_imports[""] = opset
        return model
    if have >= opset:
        return model
    try:
        with quiet_libraries():
            result = _raised(model, have, opset)
    except (RuntimeError, ValueError, NotImplementedError, ir.serde.SerdeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _refused(subject, have, opset, lines[0].strip()[:200]) from error
    if result.opset_imports.get("") != opset:
        raise _refused(subject, have, opset, "the converter left it as it was")
    return result


def _raised(model: ir.Model, have: int, opset: int) -> ir.Model:
    if have >= _OLDEST_OF_ONNXSCRIPT:
        from onnxscript import version_converter

        version_converter.convert_version(model, opset, fallback=False)
        return model
    result = converted(model, opset)
    result.producer_name, result.producer_version = model.producer_name, model.producer_version
    return result


def _refused(subject: str, have: int, opset: int, reason: str) -> ModelError:
    return ModelError(
        subject,
        f"opset {have} cannot be brought to {opset} ({reason})",
        "export the model again with a newer opset",
    )
