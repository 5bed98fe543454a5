"""Lower modules that are alike once for all tests: it is a third of what training tests take.

Processes that share the tests share what they have lowered, too. All get it as a run gets the graph
that its plan has kept, so that it does not matter who was first.

Modules are alike if their classes, attributes and inputs are the same, buffers of integers, and the
shapes and types of all else that they hold. Modules of classes without a name, as those in
functions, are lowered each time.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import Tensor, nn

from compressor.models.onnx.carrier import OnnxCarrier, restore_graph
from compressor.models.torch.matching import attach_weights, held_tensors
from compressor.models.torch.saved_module import without_weights
from compressor.types.tensors import TensorSpec

Lower = Callable[[nn.Module, Sequence[TensorSpec]], ir.Model]

KNOWN = ("torch", "transformers", "tests", "samples")
"""Packages whose code does not change while tests run."""


class _Pickler(pickle.Pickler):
    """Writes a module with shapes and types in place of the numbers that training changes."""

    def __init__(self, file: io.BytesIO, module: nn.Module):
        super().__init__(file)
        held = held_tensors(module)
        self._names: dict[int, list[str]] = {}  # more than one, where layers share a tensor
        for name, tensor in held.items():
            self._names.setdefault(id(tensor), []).append(name)
        trained = [t for t in held.values() if t.is_floating_point() or not t.ndim]
        self._trained = {id(tensor) for tensor in trained}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        numbers = b"" if id(value) in self._trained else value.detach().numpy().tobytes()
        return self._names.get(id(value)), str(value.dtype), tuple(value.shape), numbers


def likeness(module: nn.Module, inputs: Sequence[TensorSpec]) -> str | None:
    """Return what is equal for modules with the same graph; ``None`` if that cannot be told."""
    text = io.BytesIO()
    try:
        _Pickler(text, module).dump(module.eval())
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return None  # RuntimeError: modules whose parameters are computed refuse to be pickled
    digest = hashlib.sha256(text.getvalue())
    digest.update(str([str(spec) for spec in inputs]).encode())
    for name in sorted({type(part).__module__ for part in module.modules()}):
        if name.partition(".")[0] not in KNOWN:
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None:
                return None
            for code in sorted(Path(file).parent.glob("*.py")):
                digest.update(code.read_bytes())
    return digest.hexdigest()


def remembering(lower: Lower, folder: Path) -> Lower:
    """Return the function with a memory, which lies in a folder."""
    graphs: dict[str, ir.Model] = {}

    def lowered(module: nn.Module, inputs: Sequence[TensorSpec]) -> ir.Model:
        key = likeness(module, inputs)
        if key is None:
            return lower(module, inputs)
        place = folder / key
        if not place.exists():
            _keep(without_weights(lower(module, inputs), module), place)
        if key not in graphs:
            graphs[key] = restore_graph(place).graph()
        graph = graphs[key].clone()
        attach_weights(graph, module)
        return graph

    return lowered


def _keep(graph: ir.Model, place: Path) -> None:
    """Store a graph all at once; another process may be as quick."""
    staging = place.with_name(f"{place.name}-{os.getpid()}")
    staging.mkdir()
    OnnxCarrier(graph).save(staging)
    try:
        staging.rename(place)
    except OSError:
        if not place.exists():
            raise
        shutil.rmtree(staging)
