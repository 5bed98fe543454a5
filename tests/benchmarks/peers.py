"""ONNX Runtime's own static quantization, as the peer that benchmarks are measured against."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from compressor.types.tensors import Batch

METHODS = ("MinMax", "Entropy", "Percentile")


class _Reader(CalibrationDataReader):
    def __init__(self, batches: list[Batch]):
        self._batches: Iterator[Batch] = iter(batches)

    def get_next(self) -> Batch | None:
        return next(self._batches, None)


def prepare(model: Path, prepared: Path, *, symbolic: bool = True) -> None:
    """Run ONNX Runtime's recommended preparation of a float model.

    Args:
        symbolic: infer shapes with symbols, too, which does not work for every model.
    """
    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=not symbolic)


def quantize(
    model: Path,
    target: Path,
    batches: list[Batch],
    method: str,
    symmetric: bool,
    channels: bool = True,
) -> None:
    """Quantize with ONNX Runtime: Q/DQ, int8 weights per channel, uint8 or int8 activations."""
    logging.disable(logging.WARNING)
    try:
        quantize_static(
            str(model),
            str(target),
            _Reader([{k: np.ascontiguousarray(v) for k, v in b.items()} for b in batches]),
            quant_format=QuantFormat.QDQ,
            per_channel=channels,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod[method],
            extra_options={"ActivationSymmetric": symmetric},
        )
    finally:
        logging.disable(logging.NOTSET)
