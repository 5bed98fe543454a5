"""From PyTorch's program to an ExecuTorch program, computed by XNNPACK where it can."""

from __future__ import annotations

import json

import onnx_ir as ir
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.kernels import quantized
from executorch.runtime import Runtime

from compressor.errors import SpecError, first_line
from compressor.exporters.torch_program.export import TorchProgram, exported, interface
from compressor.models.executorch import INTERFACE
from compressor.progress import quiet_libraries

assert quantized  # the import registers kernels for what XNNPACK leaves
_TAKEN = frozenset(
    {"aten::hardswish", "aten::hardsigmoid", "aten::prelu", "aten::_assert_tensor_metadata"}
)
"""What needs no kernel of the runtime: XNNPACK computes it, or it is a note."""


def check_kernels(lowered: TorchProgram) -> None:
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
                "export onnx instead, try litert, or change the network",
            )  # fmt: skip


def content(model: ir.Model, notes: str) -> bytes:
    """Return the bytes of a program.

    Args:
        notes: who wrote it.

    Raises:
        SpecError: see :func:`compressor.exporters.torch_program.export.exported`.
    """
    lowered = exported(model, planned=False)
    names = {"inputs": interface(model.graph.inputs), "outputs": interface(model.graph.outputs)}
    described = json.dumps({**names, "notes": notes}, sort_keys=True)
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
                "export executorch", f"ExecuTorch does not write it ({first_line(error)})",
                "export onnx instead, or try litert",
            ) from error  # fmt: skip
