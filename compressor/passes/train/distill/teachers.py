"""A teacher: a model that is run for the outputs that a student is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.models.element_types import to_numpy
from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.distill.taps import (
    executes_graph,
    hooked,
    layer_values,
    seen_output,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import TensorSpec


class Teacher:
    """A model that a student learns from.

    It is run for some of its outputs and layers; ``where`` is the option that names the layers.
    PyTorch runs a module if there is a GPU, or if layers are named that a graph does not have;
    otherwise ONNX Runtime runs the graph, which takes less time on a CPU. The data fit the
    student's inputs.

    Raises:
        SpecError: it takes other inputs than the student, or has no layer of a name.
        ModelError: it cannot be run.
    """

    def __init__(
        self,
        carrier: Carrier,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[str],
        layers: Sequence[str] = (),
        where: str = "features",
    ):
        self._inputs = matched_inputs(carrier.inputs, inputs)
        self._specs = {spec.name: spec for spec in carrier.inputs}
        first = carrier.inputs[0].shape if carrier.inputs else ()
        self._fixed = first[0] if first and isinstance(first[0], int) else None
        self._run = _runner(carrier, outputs, layers, where)
        self.runtime = self._run.runtime
        # What its outputs depend on beside the data.
        self.identity = {"digest": digest(carrier), "runtime": self.runtime}

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it on the student's inputs ``[N, ...]``; return outputs, and those of layers.

        They are float32 where they are floats.
        """
        inputs = {}
        for name, source in self._inputs.items():
            tensor = tensors[source]
            inputs[name] = tensor.to(getattr(torch, self._specs[name].dtype, tensor.dtype))
        samples = len(next(iter(inputs.values())))
        if self._fixed is None or samples == self._fixed:
            return self._run(inputs)
        parts = [
            self._run({name: _filled(t[start:], self._fixed) for name, t in inputs.items()})
            for start in range(0, samples, self._fixed)
        ]
        return {name: torch.cat([part[name] for part in parts])[:samples] for name in parts[0]}


def _filled(tensor: Tensor, samples: int) -> Tensor:
    """Return exactly ``samples`` samples, the last one repeated as often as it takes."""
    rows = torch.arange(samples, device=tensor.device).clamp(max=len(tensor) - 1)
    return tensor[rows]


def matched_inputs(teacher: Sequence[TensorSpec], student: Sequence[TensorSpec]) -> dict[str, str]:
    """Return which of the student's inputs each of the teacher's is, by name or else by order.

    Raises:
        SpecError: they are others.
    """
    names = [spec.name for spec in student]
    if all(spec.name in names for spec in teacher):
        return {spec.name: spec.name for spec in teacher}
    if len(teacher) == len(student):
        return {spec.name: name for spec, name in zip(teacher, names, strict=True)}
    theirs, ours = (", ".join(map(str, inputs)) for inputs in (teacher, student))
    raise SpecError(
        "teacher",
        f"takes {theirs}, but the student takes {ours}",
        "name a teacher that takes the same inputs",
    )


def _runner(
    carrier: Carrier, outputs: Sequence[str], layers: Sequence[str], where: str
) -> _ByModule | _BySession:
    if Capability.TRAIN in carrier.offers:
        in_graph = {layer.name for layer in carrier.layers()}.issuperset(layers)
        if torch.cuda.is_available() or not in_graph:
            module = carrier.trainable()
            assert isinstance(module, NamedModule)
            if not layers or not executes_graph(module):
                return _ByModule(module, outputs, layers)
    values = dict(zip(layers, layer_values(layers, carrier, where), strict=True))
    return _BySession(carrier, outputs, values)


class _ByModule:
    def __init__(self, module: NamedModule, outputs: Sequence[str], layers: Sequence[str]):
        self._module = module.eval().requires_grad_(False)
        self._outputs, self._layers = outputs, layers
        self._device = torch.device("cpu")
        place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self.runtime = f"torch {torch.__version__} ({place})"

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(inputs.values())).device
        if device != self._device:
            self._module.to(device)
            self._device = device
        with hooked(self._module.module, self._layers) as seen:
            outputs = self._module(**inputs)
        layers = {name: seen_output(seen, name) for name in self._layers}
        tensors = {**layers, **{name: outputs[name] for name in self._outputs}}
        return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


class _BySession:
    def __init__(self, carrier: Carrier, outputs: Sequence[str], layers: Mapping[str, str]):
        self._runner = carrier.runner(list(layers.values()))
        self._sources = {**layers, **{name: name for name in outputs}}
        self.runtime = self._runner.runtime

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(inputs.values())).device
        outputs = self._runner.run({name: to_numpy(t.cpu()) for name, t in inputs.items()})
        tensors = {}
        for name, value in self._sources.items():
            array = outputs[value]
            if array.dtype.kind not in "iub":
                array = array.astype(np.float32, copy=False)
            tensors[name] = torch.from_numpy(array).to(device)
        return tensors


def digest(carrier: Carrier) -> str:
    """Return a hash of a model's operators and weights."""
    sha256 = hashlib.sha256()
    graph = carrier.graph().graph
    for node in graph:
        sha256.update(ir.serde.serialize_node(node).SerializeToString(deterministic=True))
    for name, value in sorted(graph.initializers.items()):
        if value.const_value is not None:
            sha256.update(f"{name}:{value.const_value.dtype}:{value.const_value.shape}".encode())
            sha256.update(value.const_value.tobytes())
    return sha256.hexdigest()
