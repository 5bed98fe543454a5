"""Run an engine on the GPU, with PyTorch's tensors as its buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import ArtifactError, ModelError
from compressor.exporters.tensorrt.build_process import messages
from compressor.models.element_types import from_numpy, to_numpy
from compressor.types.tensors import Array, Batch, Feed, samples_in

_DEVICE = "cuda"
_TORCH = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


class EngineRunner:
    """One engine with one execution context.

    A batch that is larger than the engine's largest is run in parts; a smaller one than its
    smallest is filled up with copies of its last sample.

    Raises:
        ArtifactError: TensorRT does not open it.
    """

    def __init__(self, package: ModuleType, path: Path):
        heard = messages(package)
        runtime = package.Runtime(heard)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        context = None if engine is None else engine.create_execution_context()
        if context is None:
            raise ArtifactError(
                f"artifact {path.name!r}",
                f"is not opened by TensorRT {package.__version__} ({heard.error or 'no reason'})",
                "build it for the compute capability of this GPU",
            )
        # TensorRT's objects need their logger and runtime for as long as they live.
        self._kept = (heard, runtime)
        self._engine, self._context = engine, context
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # has no types
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        first = package.TensorIOMode.INPUT
        self._inputs = [n for n in names if engine.get_tensor_mode(n) == first]
        self._outputs = [n for n in names if engine.get_tensor_mode(n) != first]
        device = torch.cuda.get_device_name()
        self.runtime = f"{package.__name__} {package.__version__} ({device})"

    def run(self, batch: Batch) -> Batch:
        """Run one batch, in parts if it is large; arrays that the model does not take are ignored.

        Raises:
            ModelError: an input is missing, or has a shape that the engine was not built for.
        """
        missing = [name for name in self._inputs if name not in batch]
        if missing:
            raise ModelError(f"input {missing[0]!r}", "is missing", "give it in the data")
        if isinstance(batch, Feed):
            return self._run({name: batch[name] for name in self._inputs})
        count = samples_in(batch)
        low, high = self._batch_range(count)
        parts = []
        for start in range(0, count, high):
            part = {name: batch[name][start : start + high] for name in self._inputs}
            held = len(part[self._inputs[0]])
            outputs = self._run({name: _filled(array, low) for name, array in part.items()})
            parts.append({name: array[:held] for name, array in outputs.items()})
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in self._outputs}

    def _batch_range(self, count: int) -> tuple[int, int]:
        name = self._inputs[0]
        if -1 not in tuple(self._engine.get_tensor_shape(name))[:1]:
            return count, max(count, 1)
        low, _, high = self._engine.get_tensor_profile_shape(name, 0)
        return int(low[0]), int(high[0])

    def _run(self, batch: Mapping[str, Array]) -> Batch:
        with torch.cuda.stream(self._stream):
            held = {name: self._input(name, array) for name, array in batch.items()}
            made = {name: self._output(name) for name in self._outputs}
            for name, tensor in (*held.items(), *made.items()):
                self._context.set_tensor_address(name, tensor.data_ptr())
            done = self._context.execute_async_v3(self._stream.cuda_stream)
        self._stream.synchronize()
        if not done:
            raise ModelError("the engine", "does not run", "report it with the spec")
        return {name: to_numpy(tensor.cpu()) for name, tensor in made.items()}

    def _input(self, name: str, array: Array) -> torch.Tensor:
        tensor = from_numpy(ir.tensor(np.ascontiguousarray(array))).to(_DEVICE, self._dtype(name))
        if not self._context.set_input_shape(name, tuple(tensor.shape)):
            raise ModelError(
                f"input {name!r}",
                f"has shape {list(tensor.shape)}, which the engine was not built for",
                "widen the profile of this input in the export tensorrt",
            )
        return tensor

    def _output(self, name: str) -> torch.Tensor:
        shape = tuple(int(d) for d in self._context.get_tensor_shape(name))
        if any(length < 0 for length in shape):
            raise ModelError(
                f"output {name!r}",
                "has a shape that depends on values; such engines are not run here",
                "leave out data.evaluation, or the export tensorrt",
            )
        return torch.empty(shape, dtype=self._dtype(name), device=_DEVICE)

    def _dtype(self, name: str) -> torch.dtype:
        kind: Any = self._engine.get_tensor_dtype(name)
        return _TORCH[kind.name]


def _filled(array: Array, low: int) -> Array:
    lacking = low - len(array)
    return array if lacking <= 0 else np.concatenate([array, np.repeat(array[-1:], lacking, 0)])
