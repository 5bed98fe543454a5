"""Run ONNX models in OpenVINO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import ModelError
from compressor.types.tensors import Batch

# Where a CPU has instructions for it, OpenVINO computes in bfloat16, and it rounds activations to
# 8 bits before narrow weights. What is measured is the file, on every machine the same one.
_EXACT: Mapping[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "PERFORMANCE_HINT": "LATENCY",
}


class OpenVinoRunner:
    """A model compiled for OpenVINO's CPU plugin.

    Args:
        path: the ONNX file.
        subject: what the model is, for messages.
        threads: how many compute; ``None`` leaves it to OpenVINO.

    Raises:
        ModelError: OpenVINO does not read or compile it.
    """

    def __init__(self, path: Path, subject: str, threads: int | None = None):
        import openvino

        release = openvino.__version__.partition("-")[0]
        core = openvino.Core()
        settings = {**_EXACT} if threads is None else {**_EXACT, "INFERENCE_NUM_THREADS": threads}
        try:
            self._model = core.compile_model(core.read_model(path), "CPU", settings)
        except RuntimeError as error:
            raise ModelError(
                subject,
                f"OpenVINO {release} does not load it ({_reason(error)})",
                "export it with another opset, or for another target",
            ) from error
        self._subject = subject
        self._request = self._model.create_infer_request()
        self._inputs = {port.any_name for port in self._model.inputs}
        self._outputs = [port.any_name for port in self._model.outputs]
        self.runtime = f"openvino {release} (CPU)"

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: the runtime fails.
        """
        feed = {name: array for name, array in batch.items() if name in self._inputs}
        try:
            found = self._request.infer(feed)
        except RuntimeError as error:
            raise ModelError(
                self._subject,
                f"does not run ({_reason(error)})",
                "check the inputs' shapes and dtypes in the spec",
            ) from error
        # The request's own buffers are written again by the next run.
        return {name: np.array(found[name]) for name in self._outputs}

    @property
    def threads(self) -> int:
        """How many threads compute."""
        return int(self._model.get_property("INFERENCE_NUM_THREADS"))

    def precisions(self) -> Counter[tuple[str, str]]:
        """Count the layers that were compiled, by their kind and the type they compute in."""
        found: Counter[tuple[str, str]] = Counter()
        for op in self._model.get_runtime_model().get_ops():
            facts = op.get_rt_info()
            if "layerType" in facts and "runtimePrecision" in facts:
                found[facts["layerType"].astype(str), facts["runtimePrecision"].astype(str)] += 1
        return found


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
