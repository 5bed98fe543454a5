"""Run ExecuTorch programs in its runtime, on the CPU."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.errors import ArtifactError, last_line, run_failure
from compressor.models.litert import without_greeting
from compressor.models.threads import usual_threads
from compressor.progress import quiet_libraries
from compressor.types.tensors import Batch, TensorSpec

PACKAGE = "executorch"
INTERFACE = "interface"
"""The method of a program that returns the names of inputs and outputs, as JSON."""

_METHOD = "forward"
ELEMENT_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 11: "bool", 15: "bfloat16", 27: "uint16", 28: "uint32", 29: "uint64",
}  # fmt: skip
"""Names of element types by their number in PyTorch."""


class ExecutorchRunner:
    """A program that ExecuTorch's runtime has loaded, with XNNPACK's and the portable kernels.

    A program takes one sample; a batch is run sample by sample.

    Raises:
        ArtifactError: the runtime does not load the file, or it is not one of ours.
    """

    def __init__(self, path: Path, subject: str):
        from executorch.extension.pybindings import portable_lib

        with quiet_libraries():
            from executorch.kernels import quantized

        assert quantized  # the import registers kernels for what XNNPACK leaves
        self._subject = subject
        self.runtime = f"{PACKAGE} {version(PACKAGE)} (CPU)"
        self.threads = usual_threads() or 1
        checked = portable_lib.Verification.InternalConsistency
        try:
            with without_greeting():
                portable_lib._unsafe_reset_threadpool(self.threads)
                # Kept, since what it loads lies in it.
                self._program: Any = portable_lib._load_program(
                    str(path), program_verification=checked
                )
                described = self._program.load_method(INTERFACE)([])[0]
                self._method: Any = self._program.load_method(_METHOD)
            interface = json.loads(described)
            self._inputs = [(str(x["name"]), bool(x["samples"])) for x in interface["inputs"]]
            self._outputs = [(str(x["name"]), bool(x["samples"])) for x in interface["outputs"]]
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                subject, f"ExecuTorch does not load it ({last_line(error)})", "export it again"
            ) from error

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: the runtime fails.
        """
        counts = {len(batch[name]) for name, samples in self._inputs if samples}
        found = [self._one(batch, index) for index in range(counts.pop() if counts else 1)]
        return {
            name: np.concatenate([x[place] for x in found]) if samples else found[0][place]
            for place, (name, samples) in enumerate(self._outputs)
        }

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""
        meta = self._method.method_meta()
        specs = []
        for place, (name, samples) in enumerate(self._inputs):
            tensor = meta.input_tensor_meta(place)
            shape: tuple[int | None, ...] = tuple(tensor.sizes())
            shape = (None, *shape[1:]) if samples else shape
            specs.append(TensorSpec(name, shape, ELEMENT_TYPES[tensor.dtype()]))
        return tuple(specs)

    def _one(self, batch: Batch, index: int) -> list[np.ndarray]:
        arrays = [batch[name][index : index + 1] if s else batch[name] for name, s in self._inputs]
        try:
            given = [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
            return [x.numpy() for x in self._method(given)]
        except (RuntimeError, ValueError, TypeError) as error:
            raise run_failure(self._subject, last_line(error)) from error
