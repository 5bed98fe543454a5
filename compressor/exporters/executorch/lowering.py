"""From recorded calls to the bytes of an ExecuTorch program, computed by XNNPACK where it can."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.kernels import quantized
from executorch.runtime import Runtime
from torch import Tensor

from compressor.errors import SpecError
from compressor.exporters.executorch.calls import Recorded
from compressor.exporters.executorch.recording import Recorder
from compressor.graph.values import dims
from compressor.models.element_types import TORCH_DTYPES
from compressor.models.executorch import INTERFACE
from compressor.progress import quiet_libraries

assert quantized  # the import registers kernels for what XNNPACK leaves
_REASON = 200  # characters
_CALL_BYTES = 200
_FILE_BYTES = 6000
_TAKEN = frozenset(
    {"aten::hardswish", "aten::hardsigmoid", "aten::prelu", "aten::_assert_tensor_metadata"}
)
"""What needs no kernel of the runtime: XNNPACK computes it, or it is a note."""


@dataclass(frozen=True)
class Lowered:
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


def exported(model: ir.Model, *, planned: bool) -> Lowered:
    """Return a graph as PyTorch exports it, for one sample at a time.

    Args:
        planned: constants that are not computed yet are taken as zeros.

    Raises:
        SpecError: a value has a length that is not fixed, or ExecuTorch cannot take a node.
    """
    inputs = [_example(value) for value in model.graph.inputs if not value.is_initializer()]
    for value in model.graph.outputs:
        _lengths(value)
    recorder = Recorder(model, planned)
    module = recorder.record(inputs)
    with quiet_libraries():
        program = _traced(module, inputs)
    weights = sum(x.numel() * x.element_size() for x in program.state_dict.values())
    return Lowered(program, weights, len(module.calls), len(recorder.widened))


def check_kernels(lowered: Lowered) -> None:
    """Refuse operators that the runtime has no kernel for.

    Raises:
        SpecError: naming the first.
    """
    with quiet_libraries():
        kernels = Runtime.get().operator_registry.operator_names
        graph = lowered.program.run_decompositions().graph
    bases = {name.partition(".")[0] for name in kernels}
    bases |= {name.removesuffix("_copy") for name in bases} | _TAKEN
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        name = str(schema.name)
        if name.startswith("aten::") and name not in bases:
            raise SpecError(
                "export executorch", f"the runtime has no kernel for {name}",
                "export onnx or litert instead, or change the network",
            )  # fmt: skip


def content(model: ir.Model, notes: str) -> bytes:
    """Return the bytes of a program.

    Args:
        notes: who wrote it.

    Raises:
        SpecError: see :func:`exported`.
    """
    lowered = exported(model, planned=False)
    interface = {"inputs": _names(model.graph.inputs), "outputs": _names(model.graph.outputs)}
    described = json.dumps({**interface, "notes": notes}, sort_keys=True)
    with quiet_libraries():
        try:
            edge = to_edge_transform_and_lower(
                lowered.program,
                partitioner=[XnnpackPartitioner()],
                compile_config=EdgeCompileConfig(_check_ir_validity=False),
                constant_methods={INTERFACE: described},
            )
            return bytes(edge.to_executorch().buffer)
        except (RuntimeError, AssertionError, ValueError, KeyError, NotImplementedError) as error:
            raise SpecError(
                "export executorch", f"ExecuTorch does not write it ({_reason(error)})",
                "export onnx or litert instead",
            ) from error  # fmt: skip


def _traced(module: Recorded, inputs: Sequence[Tensor]) -> Any:
    try:
        program = torch.export.export(module, tuple(inputs), strict=False)
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise SpecError(
            "export executorch", f"PyTorch's exporter does not take it ({_reason(error)})",
            "export onnx or litert instead",
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
            "has a length that is not fixed; in an ExecuTorch file only samples may be many",
            "give the inputs fixed lengths, all but the first: a network in Python by "
            "model.inputs, an ONNX file where it is exported",
        )
    return tuple(1 if length < 0 else length for length in shape)


def _names(values: Sequence[ir.Value]) -> list[dict[str, object]]:
    """Return names, and whether the first axis is that of samples."""
    found: list[dict[str, object]] = []
    for value in values:
        if not value.is_initializer():
            shape = dims(value, symbolic=-1)
            found.append({"name": value.name, "samples": shape is not None and shape[:1] == (-1,)})
    return found


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:_REASON] if lines else type(error).__name__
