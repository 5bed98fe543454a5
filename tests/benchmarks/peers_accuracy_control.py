"""Quantize the face detector by NNCF's accuracy control; run by the Python that has NNCF.

    python peers_accuracy_control.py FLOAT.onnx IMAGES.npz DROP TARGET.onnx

IMAGES has the prepared arrays ``calibration`` and ``evaluation``. Prints a line for each evaluation
that NNCF makes as it is made: its number, the mean F1 to the float model, and the seconds of the
processor until then. What NNCF ends with is in TARGET, and in a last line that begins with ``end``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import onnx
import onnxruntime as ort
from detections import Array, Outputs, f1
from onnx import version_converter


def outputs_of(model: Any, images: Iterable[Array]) -> list[Outputs]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names, entry = [o.name for o in session.get_outputs()], session.get_inputs()[0].name
    return [
        dict(zip(names, session.run(None, {entry: image[None]}), strict=True)) for image in images
    ]


def main(source: str, data: str, drop: str, target: str) -> None:
    # In opset 21, NNCF 3.4 writes types that do not agree, and ONNX Runtime refuses its file.
    model, images = version_converter.convert_version(onnx.load(source), 17), np.load(data)
    entry = model.graph.input[0].name
    wanted = outputs_of(model, images["evaluation"])
    counted, start = [], time.process_time()

    def judged(candidate: Any, _: Any = None) -> tuple[float, list[float]]:
        found = outputs_of(candidate, images["evaluation"])
        values = [float(f1(x, y)[0]) for x, y in zip(found, wanted, strict=True)]
        counted.append(float(np.mean(values)))
        print(len(counted), counted[-1], time.process_time() - start, flush=True)
        return counted[-1], values

    sets = [
        nncf.Dataset([{entry: image[None]} for image in images[role]])
        for role in ("calibration", "evaluation")
    ]
    made = nncf.quantize_with_accuracy_control(
        model,
        *sets,
        judged,
        max_drop=float(drop),
        drop_type=nncf.DropType.ABSOLUTE,
        advanced_accuracy_restorer_parameters=nncf.AdvancedAccuracyRestorerParameters(
            num_ranking_workers=1
        ),
    )
    seconds, evaluations = time.process_time() - start, len(counted)
    onnx.save(made, target)
    print("end", evaluations, judged(made)[0], seconds, Path(target).stat().st_size, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
