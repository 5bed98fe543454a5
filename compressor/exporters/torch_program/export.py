"""A graph as PyTorch's exporter has it, for one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import SpecError, first_line
from compressor.exporters.torch_program.calls import Recorded
from compressor.exporters.torch_program.recording import Recorder
from compressor.graph.values import dims
from compressor.models.element_types import TORCH_DTYPES
from compressor.progress import quiet_libraries

_CALL_BYTES = 200
_FILE_BYTES = 6000


@dataclass(frozen=True)
class TorchProgram:
    """A graph as PyTorch's exporter has it.

    Attributes:
        program: the exported program.
        weights: bytes of its constants.
        calls: how many operators it calls.
        widened: how many layers have quantized weights that are written as floats.
    """

    program: Any
    weights: int
    calls: int
    widened: int

    @property
    def size(self) -> int:
        """About the bytes of its file."""
        return self.weights + _CALL_BYTES * self.calls + _FILE_BYTES


def exported(model: ir.Model, *, planned: bool, alone: bool = False) -> TorchProgram:
    """Return a graph as PyTorch exports it, for one sample at a time.

    Args:
        planned: constants that are not computed yet are taken as zeros.
        alone: weights keep their codes also where activations have none.

    Raises:
        SpecError: a value has a length that is not fixed, or a node cannot be exported.
    """
    inputs = [_example(value) for value in model.graph.inputs if not value.is_initializer()]
    for value in model.graph.outputs:
        _lengths(value)
    recorder = Recorder(model, planned, alone)
    module = recorder.record(inputs)
    with quiet_libraries():
        program = _traced(module, inputs)
    weights = sum(x.numel() * x.element_size() for x in program.state_dict.values())
    return TorchProgram(program, weights, len(module.calls), len(recorder.widened))


def _traced(module: Recorded, inputs: Sequence[Tensor]) -> Any:
    try:
        program = torch.export.export(module, tuple(inputs), strict=False)
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise SpecError(
            "the graph", f"PyTorch's exporter does not take it ({first_line(error)})",
            "export onnx instead",
        ) from error  # fmt: skip
    return program


def _example(value: ir.Value) -> Tensor:
    dtype = torch.float32 if value.dtype is None else TORCH_DTYPES[value.dtype]
    return torch.zeros(_lengths(value), dtype=dtype)


def _lengths(value: ir.Value) -> tuple[int, ...]:
    """Return a value's shape for one sample."""
    shape = dims(value, symbolic=-1)
    if shape is None or any(length < 0 for length in shape[1:]):
        raise SpecError(
            f"value {value.name!r}",
            "has a length that is not fixed; in such a file only samples may be many",
            "give the inputs fixed lengths, all but the first: a network in Python by "
            "model.inputs, an ONNX file where it is exported",
        )
    return tuple(1 if length < 0 else length for length in shape)


def interface(values: Sequence[ir.Value]) -> list[dict[str, object]]:
    """Return names of inputs or outputs, and whether their first axis is that of samples."""
    found: list[dict[str, object]] = []
    for value in values:
        if not value.is_initializer():
            shape = dims(value, symbolic=-1)
            found.append({"name": value.name, "samples": shape is not None and shape[:1] == (-1,)})
    return found
