"""ONNX graphs as PyTorch modules: run by PyTorch, or by ONNX Runtime where PyTorch cannot."""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnx_ir.external_data import load_to_model
from torch import Tensor

from compressor.errors import ModelError, SpecError
from compressor.graph.values import all_nodes
from compressor.models.element_types import from_numpy, to_numpy
from compressor.models.executor import (
    OLDEST_OPSET,
    GraphModule,
    bound_inputs,
    unknown_operators,
)
from compressor.models.onnx.carrier import check_numbers, upgraded
from compressor.models.onnx.checks import foreign_operators
from compressor.models.onnx.file import read_onnx
from compressor.models.onnx.ort_runner import graph_runner, lacks_kernels
from compressor.models.onnx.ort_session import OrtRunner, merges_halves
from compressor.models.torch.lowering import OPSET
from compressor.models.torch.matching import TorchRunner
from compressor.types.carrier import Runner


class RuntimeModule(torch.nn.Module):
    """A graph that ONNX Runtime executes on the CPU; it is called as a `GraphModule` is.

    The weights are in the runtime's session, so the module has no parameters and no buffers.

    Args:
        model: the graph with its weights.
        subject: what it is, for messages.

    Attributes:
        input_names: the inputs that a call has to give, in order.
        output_names: the outputs, in order.
        runner: what executes the graph.
        runtime: the runtime's name and version.

    Raises:
        ModelError: ONNX Runtime does not load the graph.
    """

    def __init__(self, model: ir.Model, subject: str):
        super().__init__()
        initializers = model.graph.initializers
        inputs = (value.name or "" for value in model.graph.inputs)
        self.input_names = tuple(name for name in inputs if name not in initializers)
        self.output_names = tuple(value.name or "" for value in model.graph.outputs)
        self.runner = graph_runner(model, subject=subject)
        self.runtime = self.runner.runtime

    def forward(self, *arguments: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Run the graph on inputs by position or name; return the outputs by name.

        Raises:
            ModelError: an input is missing, unknown or no tensor, or the runtime fails.
        """
        values = bound_inputs(self.input_names, arguments, inputs)
        batch = {name: to_numpy(value.detach().cpu()) for name, value in values.items()}
        outputs = self.runner.run(batch)
        return {name: from_numpy(ir.tensor(array)) for name, array in outputs.items()}


def in_runtime(
    model: ir.Model, subject: str, reason: str, device: str, stacklevel: int
) -> RuntimeModule:
    """Return a module that ONNX Runtime executes, and warn that it does.

    Args:
        model: the graph with its weights.
        subject: what it is, for messages.
        reason: why PyTorch does not run it.
        device: where the caller wants it.
        stacklevel: how many calls up the warning belongs.

    Raises:
        SpecError: the device is not the CPU.
        ModelError: ONNX Runtime does not load the graph.
    """
    if device != "cpu":
        raise SpecError(
            f"device {device!r}",
            f"is not usable: the model runs in ONNX Runtime on the CPU, since {reason}",
            "use cpu",
        )
    module = RuntimeModule(model, subject)
    module.eval()
    message = f"{subject} is executed by {module.runtime}: {reason}"
    warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
    return module


def onnx_module(
    path: Path, *, device: str, mmap: bool, once: bool, stacklevel: int
) -> torch.nn.Module:
    """Return an ONNX file of whatever origin as a module in evaluation mode, on the CPU.

    Args:
        path: the file.
        device: where the caller wants it; a graph that ONNX Runtime runs stays on the CPU.
        mmap: map external data; otherwise read them now.
        once: keep what the first call computes from weights alone.
        stacklevel: how many calls up a warning belongs.

    Raises:
        SpecError: the path is missing, or ONNX Runtime is to run on another device than the CPU.
        ModelError: the file is not a sound ONNX file, takes or gives text, or neither PyTorch nor
            ONNX Runtime runs it.
    """
    subject = f"model {str(path)!r}"
    model = read_onnx(path)
    if not mmap:
        load_to_model(model)
    check_numbers(model, subject)
    common.InlinePass()(model)
    foreign = foreign_operators(model)
    operators = unknown_operators((node.domain, node.op_type) for node in all_nodes(model.graph))
    reason = f"PyTorch does not run {', '.join(operators)} here"
    if not operators:
        try:
            return GraphModule(_of_known_opset(model, subject), keeps_constants=once).eval()
        except ModelError as error:
            reason = f"PyTorch does not run it here ({error.subject}: {error.problem})"
    if foreign:
        raise ModelError(
            subject,
            f"cannot be run: neither PyTorch nor ONNX Runtime has the operator {foreign[0]}",
            "export the model again without it",
        )
    return in_runtime(model, subject, reason, device, stacklevel + 1)


def _of_known_opset(model: ir.Model, subject: str) -> ir.Model:
    """Return a graph in an opset that PyTorch runs; the given one is not changed.

    Raises:
        ModelError: it cannot be converted.
    """
    if model.opset_imports.get("", OPSET) >= OLDEST_OPSET:
        return model
    return upgraded(model.clone(), OPSET, subject)


def file_runner(path: Path, graph: ir.Model) -> Runner:
    """Start a runtime for an ONNX file as it is: ONNX Runtime, or PyTorch where that lacks kernels.

    Args:
        path: the file.
        graph: what was made of it; its types tell whether ONNX Runtime has the kernels.

    Raises:
        ModelError: it does not load.
    """
    subject = f"model {str(path)!r}"
    if lacks_kernels(graph):
        return TorchRunner(onnx_module(path, device="cpu", mmap=True, once=True, stacklevel=1))
    try:
        return OrtRunner(path, subject, merge=not merges_halves(path))
    except ModelError:
        # It takes no axes and shapes from another file, where onnx puts all if it is told to.
        model = ir.load(path)
        tensors = [value.const_value for value in model.graph.initializers.values()]
        if not any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors):
            raise
        return graph_runner(model, subject=subject)
