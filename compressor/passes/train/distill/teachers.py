"""A teacher: a model that is run, and what of it a student is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.layer_places import (
    executes_graph,
    has_layer_values,
    hooked,
    layer_values,
    seen_output,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import TensorSpec


class Runs(Protocol):
    """Runs a model without gradients, as in evaluation."""

    @property
    def runtime(self) -> str:
        """What executes it."""
        ...

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs by name, and layers' outputs by the layers' names."""
        ...


@dataclass(frozen=True)
class Taps:
    """What is wanted of a teacher.

    Attributes:
        outputs: names of outputs.
        layers: names of layers.
        where: the option that names the layers, for messages.
    """

    outputs: Sequence[str]
    layers: Sequence[str] = ()
    where: str = "features"


class Teacher:
    """A model that a student learns from.

    A module is run by PyTorch where there is a GPU, and where layers are named that a graph does
    not know; otherwise ONNX Runtime runs the graph, which takes less time on a CPU.

    Args:
        carrier: the model.
        taps: what is wanted of it.
        inputs: the student's, which the data are given for.

    Raises:
        SpecError: it takes other inputs than the student, or has no layer of a name.
        ModelError: it cannot be run.
    """

    def __init__(self, carrier: Carrier, taps: Taps, inputs: Sequence[TensorSpec]):
        self._taps = taps
        self._inputs = _matched(carrier.inputs, inputs)
        self._specs = {spec.name: spec for spec in carrier.inputs}
        first = carrier.inputs[0].shape if carrier.inputs else ()
        self._fixed = first[0] if first and isinstance(first[0], int) else None
        self._digest = digest(carrier)
        self._run = _runs(carrier, taps)

    @property
    def identity(self) -> dict[str, str]:
        """What its outputs depend on beside the data."""
        return {"digest": self._digest, "runtime": self._run.runtime}

    @property
    def runtime(self) -> str:
        """What executes it."""
        return self._run.runtime

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it on samples.

        Args:
            tensors: the student's inputs by name, ``[N, ...]``.

        Returns:
            Outputs and layers' outputs, as float32 where they are floats.
        """
        given = {name: self._cast(name, tensors[source]) for name, source in self._inputs.items()}
        samples = len(next(iter(given.values())))
        if self._fixed is None or samples == self._fixed:
            return self._run(given)
        parts = [
            self._run({name: _filled(t[start:], self._fixed) for name, t in given.items()})
            for start in range(0, samples, self._fixed)
        ]
        return {name: torch.cat([part[name] for part in parts])[:samples] for name in parts[0]}

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        wanted = getattr(torch, self._specs[name].dtype, tensor.dtype)
        return tensor.to(wanted)


def _filled(tensor: Tensor, samples: int) -> Tensor:
    """Return exactly so many samples, the last one as often as it takes."""
    rows = torch.arange(samples, device=tensor.device).clamp(max=len(tensor) - 1)
    return tensor[rows]


def _matched(own: Sequence[TensorSpec], given: Sequence[TensorSpec]) -> dict[str, str]:
    """Return which of the student's inputs each of the teacher's is."""
    names = [spec.name for spec in given]
    if all(spec.name in names for spec in own):
        return {spec.name: spec.name for spec in own}
    if len(own) == len(given):
        return {spec.name: name for spec, name in zip(own, names, strict=True)}
    raise SpecError(
        "teacher",
        f"takes {', '.join(map(str, own))}, the student {', '.join(map(str, given))}",
        "name a teacher that takes the same inputs",
    )


def _runs(carrier: Carrier, taps: Taps) -> Runs:
    if Capability.TRAIN in carrier.offers:
        graph_only = has_layer_values(taps.layers, carrier)
        if torch.cuda.is_available() or not graph_only:
            module = carrier.trainable()
            assert isinstance(module, NamedModule)
            if not taps.layers or not executes_graph(module):
                return _ByModule(module, taps)
    return _BySession(carrier, taps)


class _ByModule:
    def __init__(self, module: NamedModule, taps: Taps):
        self._module = module.eval().requires_grad_(False)
        self._taps = taps
        self._device = torch.device("cpu")
        place = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self.runtime = f"torch {torch.__version__} ({place})"

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(inputs.values())).device
        if device != self._device:
            self._module.to(device)
            self._device = device
        with hooked(self._module.module, self._taps.layers) as seen:
            outputs = self._module(**inputs)
        layers = {name: seen_output(seen, name) for name in self._taps.layers}
        found = {**layers, **{name: outputs[name] for name in self._taps.outputs}}
        return {n: t.float() if t.is_floating_point() else t for n, t in found.items()}


class _BySession:
    def __init__(self, carrier: Carrier, taps: Taps):
        self._values = layer_values(taps.layers, carrier, taps.where)
        self._runner = carrier.runner(self._values)
        self._taps = taps
        self.runtime = self._runner.runtime

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(inputs.values())).device
        outputs = self._runner.run({name: t.cpu().numpy() for name, t in inputs.items()})
        sources = [
            *zip(self._taps.layers, self._values, strict=True),
            *((name, name) for name in self._taps.outputs),
        ]
        found = {}
        for name, value in sources:
            array = outputs[value]
            known = array.dtype.kind in "iub"
            tensor = torch.from_numpy(array if known else array.astype(np.float32, copy=False))
            found[name] = tensor.to(device)
        return found


def digest(carrier: Carrier) -> str:
    """Return a hash of a model's operators and weights."""
    found = hashlib.sha256()
    graph = carrier.graph().graph
    for node in graph:
        found.update(ir.serde.serialize_node(node).SerializeToString(deterministic=True))
    for name, value in sorted(graph.initializers.items()):
        if value.const_value is not None:
            found.update(f"{name}:{value.const_value.dtype}:{value.const_value.shape}".encode())
            found.update(value.const_value.tobytes())
    return found.hexdigest()
