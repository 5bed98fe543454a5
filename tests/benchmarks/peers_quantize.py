"""Quantize an ONNX file with AIMET or NNCF; run by the Python that has them.

    python peers_quantize.py TOOL BITS FLOAT.onnx CALIBRATION.npy TARGET.onnx

BITS is the width of weights; activations have 8 bits. NNCF has none but 8 for both.

The calibration data are one array ``[samples, ...]``, given in batches of 32. Prints the seconds of
the processor, without those of imports. It knows nothing of the project, whose packages are not
here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

BATCH = 32
Batches = list[np.ndarray]


def nncf(source: Path, target: Path, batches: Batches, bits: int) -> float:
    import nncf

    assert bits == 8

    model = onnx.load(source)
    name = model.graph.input[0].name
    start = time.process_time()
    data = nncf.Dataset(batches, lambda batch: {name: batch})
    made = nncf.quantize(model, data, subset_size=len(batches), fast_bias_correction=False)
    seconds = time.process_time() - start
    onnx.save(made, target)
    return seconds


def aimet(source: Path, target: Path, batches: Batches, bits: int) -> float:
    import aimet_onnx
    from aimet_onnx.cross_layer_equalization import equalize_model

    model = onnx.load(source)
    feeds = [{model.graph.input[0].name: batch} for batch in batches]
    start = time.process_time()
    equalize_model(model)
    simulated = aimet_onnx.QuantizationSimModel(model, param_type=f"int{bits}")
    simulated.compute_encodings(feeds)
    seconds = time.process_time() - start
    onnx.save(simulated.to_onnx_qdq(), target)
    return seconds


TOOLS: dict[str, Callable[..., float]] = {"nncf": nncf, "aimet": aimet}


def main(tool: str, bits: str, source: str, data: str, target: str) -> None:
    array: Any = np.load(data)
    batches = [array[i : i + BATCH] for i in range(0, len(array), BATCH)]
    print(TOOLS[tool](Path(source), Path(target), batches, int(bits)))


if __name__ == "__main__":
    main(*sys.argv[1:])
