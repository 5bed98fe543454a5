"""Compress a module or a file in one call, with a Python program's own data."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from compressor.errors import SpecError
from compressor.files import scratch
from compressor.front.run import apart_from_the_program, run
from compressor.front.spec import MetricLike, ModelLike, Spec, checked, is_section
from compressor.models.element_types import of_numpy
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.lowering import arguments
from compressor.progress import SILENT
from compressor.report.result import RunResult
from compressor.run.pipeline import run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store, store_of
from compressor.run.workspace import Workspace
from compressor.types.arguments import check_arguments
from compressor.types.carrier import Capability
from compressor.types.passes import Pass

_SAMPLES = 512  # of a program's data, for calibration
_STATIC: tuple[Mapping[str, Any], ...] = ({"pass": "fuse"}, {"pass": "quantize-static"})
_DYNAMIC: tuple[Mapping[str, Any], ...] = ({"pass": "fuse"}, {"pass": "quantize-dynamic"})
ONNX = {"format": "onnx", "target": "ort-cpu"}


def quantize(
    model: ModelLike,
    data: Any = None,
    *,
    evaluate: Any = None,
    metric: MetricLike | None = None,
    passes: Sequence[Pass | Mapping[str, Any]] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Quantize a model to 8 bits, write it as ONNX, and evaluate the file in ONNX Runtime.

    The module is not modified.

    Example:
        >>> result = compressor.quantize(module, loader, evaluate=val_loader, metric="accuracy")
        >>> result.save("out/edge")

    Args:
        model: a module, the path of an ONNX file, or the section ``model`` of a spec.
        data: calibration data, of which the first 512 samples are used: a DataLoader, a Dataset,
            arrays, or an iterable of batches. Batches are tensors, arrays, tuples with the inputs
            first, or dictionaries. Without data, activations are quantized dynamically.
        evaluate: evaluation data for the float model and the file; without them, quality is
            unknown.
        metric: the name of a metric, or a function of outputs and target; by default accuracy if
            the data have labels, otherwise the cosine to the float model's outputs.
        passes: passes to apply instead of ``fuse`` and ``quantize-static``.
        output: the output folder, from which a later run resumes; by default a temporary folder
            that exists as long as the result.

    Raises:
        CompressorError: the model or the data cannot be used.
    """
    check_arguments(quantize, locals())
    usual = _DYNAMIC if data is None else _STATIC
    sources = {"calibration": first_samples(data), "evaluation": evaluate}
    spec = Spec(
        name=model_name(model),
        model=model,
        data={role: given for role, given in sources.items() if given is not None},
        metric=metric,
        passes=usual if passes is None else passes,
        exports=[ONNX],
        output=output,
    )
    if output is not None:
        return run(spec)
    folder = TemporaryFolder()
    result = run(replace(checked(spec), output=folder.path / spec.name))
    return replace(result, kept=folder)


class TemporaryFolder:
    """A temporary folder that is deleted together with this object."""

    def __init__(self) -> None:
        with ExitStack() as stack:
            self.path = stack.enter_context(scratch())
            weakref.finalize(self, stack.pop_all().close)


def prune(
    module: nn.Module,
    data: Any = None,
    *,
    macs: float = 0.5,
    passes: Sequence[Pass | Mapping[str, Any]] | None = None,
) -> nn.Module:
    """Return a smaller copy of a module, which can be trained and exported like any other.

    Whole channels and filters are removed. With data, the weights of the layers that read them are
    adjusted by least squares to reproduce their outputs; see the pass ``prune-structured``.

    Example:
        >>> smaller = compressor.prune(module, loader, macs=0.5)
        >>> optimizer = torch.optim.SGD(smaller.parameters(), lr=0.01)

    Args:
        module: the module, which is not modified.
        data: calibration data, as for :func:`compressor.quantize`.
        macs: the share of multiply-accumulates to keep.
        passes: passes to apply instead, such as ``prune-magnitude``; their result must be a
            trainable module.

    Returns:
        A module of the same class if its sizes can be adapted; otherwise one that executes the
        smaller graph. Both have the inputs and outputs of the original.

    Raises:
        CompressorError: the module or the data cannot be used, or nothing can be removed.
    """
    check_arguments(prune, locals())
    usual = ({"pass": "prune-structured", "target": {"macs": macs}},)
    spec = Spec(
        name=model_name(module),
        model=module,
        data={} if data is None else {"calibration": first_samples(data)},
        passes=usual if passes is None else passes,
        exports=[{"format": "safetensors"}],
    )
    with scratch() as folder, apart_from_the_program():
        plan = make_plan(replace(checked(spec), output=folder / spec.name))
        workspace = Workspace(plan, Store(store_of(folder / spec.name)), SILENT)
        with workspace.store.locked():
            carrier = run_passes(workspace)[-1].carrier
        if not isinstance(carrier, TorchCarrier) or Capability.TRAIN not in carrier.offers:
            raise SpecError(
                "passes",
                "leave a graph or codes, and no module that trains",
                "use compressor.run, and load() of its result",
            )
        made = deepcopy(carrier.module)
        if carrier.executes_graph:
            assert isinstance(plan.model.carrier, TorchCarrier)
            names = [spec.name for spec in carrier.inputs]
            form = output_form(plan.model.carrier.module, workspace)
            made = _as_before(made, names, form)
    return made.train(module.training)


def _as_before(network: nn.Module, inputs: Sequence[str], form: OutputForm) -> nn.Module:
    """Return a module that takes and returns what the original does, and executes a graph.

    Its ``forward`` has the inputs as parameters, as everything that calls modules by name expects.

    Args:
        network: executes the graph; it returns tensors by name.
        inputs: the names of the inputs, in the order of the original's forward.
        form: how the original arranges its outputs.
    """
    graph = fx.Graph()
    outputs = graph.call_module("network", tuple(graph.placeholder(name) for name in inputs))
    graph.output(graph.call_module("arranged", (outputs,)))
    parts = {"network": network, "arranged": _Arranged(form)}
    return fx.GraphModule(parts, graph, "Executed")


class _Arranged(nn.Module):
    """Arranges outputs by name as the original module does."""

    def __init__(self, form: OutputForm):
        super().__init__()
        self._form = form

    def forward(self, outputs: Mapping[str, torch.Tensor]) -> Any:
        """Arrange tensors that come in the order of the graph's outputs."""
        return self._form.filled(list(outputs.values()))


@dataclass(frozen=True)
class OutputForm:
    """How a module arranges its outputs.

    Attributes:
        tree: the structure of its outputs.
        others: outputs that are not tensors, such as ``None``, by position.
    """

    tree: TreeSpec
    others: Mapping[int, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputForm:
        """Return itself: copies of a module arrange alike, and PyTorch's leaves warn if copied."""
        return self

    def filled(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Arrange tensors, in the order of a graph's outputs, as the module does."""
        left = iter(outputs)
        leaves = range(self.tree.num_leaves)
        made = [self.others[i] if i in self.others else next(left) for i in leaves]
        return tree_unflatten(made, self.tree)


def output_form(module: nn.Module, workspace: Workspace) -> OutputForm:
    """Return how a module arranges its outputs, by calling it on samples of the run's data."""
    example = {n: of_numpy(a) for n, a in workspace.sample(2).items()}
    args, named = arguments(module, example)
    with torch.no_grad():
        leaves, tree = tree_flatten(module(*args, **named))
    others = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    return OutputForm(tree, others)


def first_samples(data: Any) -> Any:
    """Limit a program's calibration data to the first samples."""
    if data is None or is_section(data):
        return data
    return {"factory": data, "samples": _SAMPLES}


def model_name(model: Any) -> str:
    """Return a name for the result, from the model's file or class."""
    if isinstance(model, str | os.PathLike):
        text = Path(model).stem
    else:
        text = type(model).__name__ if isinstance(model, nn.Module) else "model"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"
