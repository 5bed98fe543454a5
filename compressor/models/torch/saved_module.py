"""How a module differs from the factory's, and how it is stored between the passes of a run."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from compressor.errors import system_error
from compressor.models.onnx.carrier import OnnxCarrier, restore_graph
from compressor.models.torch.matching import attach_weights, held_tensors
from compressor.models.torch.size_attributes import Attributes, stated
from compressor.models.torch.smaller_module import (
    set_attributes,
    trainable_graph,
    with_tensors,
)
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes

_STATE = "weights.safetensors"
_SIZES = "sizes.json"
_CODES = "codes.safetensors"
_PARTS = ("codes", "scale", "zero_point")
_OPTIONAL = ("tensor_scale", "codebook")


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error where safetensors only repeats it as text.

    Raises:
        OSError: with the number of the system's error.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(system_error(error) or errno.EIO, str(error)) from error


@dataclass(frozen=True)
class Alterations:
    """Differences between a module and the one that factory and checkpoint made.

    Attributes:
        tensors: names of the parameters and buffers that changed.
        attributes: the sizes that changed when channels were removed; ``None`` if none ever
            were.
        executes_graph: the module executes its graph, because no sizes made the factory's network
            compute the same as the smaller graph, or because layers were replaced by others.
        parameters: names of trained tensors that the factory's module does not have; only if the
            module executes its graph.
        planned: the tensors have the right sizes but no values; the module cannot be run.
    """

    tensors: frozenset[str] = frozenset()
    attributes: Attributes | None = None
    executes_graph: bool = False
    parameters: frozenset[str] = frozenset()
    planned: bool = False

    def adding(self, tensors: Iterable[str], attributes: Attributes | None = None) -> Alterations:
        """Return these alterations followed by later ones."""
        changed, merged = self.tensors.union(tensors), self.attributes
        if attributes is not None:
            before = self.attributes or {}
            merged = {
                path: {**before.get(path, {}), **attributes.get(path, {})}
                for path in {**before, **attributes}
            }
        return replace(self, tensors=changed, attributes=merged)

    @property
    def channels_removed(self) -> bool:
        """The module's tensors no longer have the factory's shapes."""
        return self.executes_graph or self.attributes is not None


def save_module(
    module: nn.Module, alterations: Alterations, graph: ir.Model | None, directory: Path
) -> None:
    """Write how a module differs from the factory's, and its graph if channels were removed."""
    if alterations.channels_removed:
        assert graph is not None
        document = {
            "attributes": alterations.attributes or {},
            "executes_graph": alterations.executes_graph,
            "parameters": sorted(alterations.parameters),
        }
        text = json.dumps(document, indent=1, sort_keys=True)
        (directory / _SIZES).write_text(text, encoding="utf-8")
        if not alterations.executes_graph:
            graph = without_weights(graph, module)
        OnnxCarrier(graph).save(directory)
    if not alterations.executes_graph:
        held = held_tensors(module)
        names = sorted(alterations.tensors)
        tensors = {name: held[name].detach().contiguous().clone() for name in names}
        with system_errors():
            save_file(tensors, directory / _STATE)


def holds_module(directory: Path) -> bool:
    """Whether a module was saved there, and not just a graph."""
    return any((directory / name).exists() for name in (_STATE, _SIZES))


def restore_module(
    directory: Path, base: nn.Module
) -> tuple[nn.Module, Alterations, ir.Model | None]:
    """Return the module that was saved there, its alterations, and its graph if that was saved.

    It shares the tensors that did not change with ``base``, whose weights may be loaded later.
    """
    sizes = directory / _SIZES
    if not sizes.exists():
        tensors = load_file(directory / _STATE)
        return with_tensors(base, tensors), Alterations(frozenset(tensors)), None
    document = json.loads(sizes.read_text(encoding="utf-8"))
    graph = restore_graph(directory).graph()
    if document["executes_graph"]:
        parameters = frozenset(document["parameters"])
        module: nn.Module = trainable_graph(graph, base, parameters)
        attach_weights(graph, module)
        return module, Alterations(executes_graph=True, parameters=parameters), graph
    tensors = load_file(directory / _STATE)
    module = with_tensors(base, tensors)
    parts = dict(base.named_modules())
    attributes = {
        path: {
            name: tuple(value) if isinstance(stated(parts[path], name), tuple) else value
            for name, value in values.items()
        }
        for path, values in document["attributes"].items()
    }
    set_attributes(module, attributes)
    attach_weights(graph, module)
    return module, Alterations(frozenset(tensors), attributes), graph


def without_weights(graph: ir.Model, module: nn.Module) -> ir.Model:
    """Return a graph without the values of the module's tensors, which are stored elsewhere."""
    graph = graph.clone()
    held = held_tensors(module)
    for name, value in graph.graph.initializers.items():
        if name in held and value.const_value is not None:
            dtype = value.const_value.dtype
            value.const_value = ir.Tensor(np.empty(0, dtype.numpy()), dtype=dtype, name=name)
    return graph


def save_codes(
    codes: Mapping[str, WeightCodes], weight: Callable[[Layer], torch.Tensor], directory: Path
) -> None:
    """Compute codes and write them; nothing is written where there are none.

    Args:
        weight: returns a layer's float weight in its stored shape.
    """
    if not codes:
        return
    tensors: dict[str, torch.Tensor] = {}
    described = {}
    for name, entry in codes.items():
        quantized = entry.read(weight)
        tensors |= {f"{name}:{part}": getattr(quantized, part).contiguous() for part in _PARTS}
        others = {part: getattr(quantized, part) for part in _OPTIONAL}
        tensors |= {f"{name}:{k}": v.contiguous() for k, v in others.items() if v is not None}
        described[name] = {"layer": asdict(entry.layer), "scheme": asdict(quantized.scheme)}
    with system_errors():
        save_file(tensors, directory / _CODES, {"codes": json.dumps(described)})


def load_codes(directory: Path) -> dict[str, WeightCodes]:
    """Return the codes that were saved there; tensors stay memory-mapped."""
    path = directory / _CODES
    if not path.is_file():
        return {}
    loaded = {}
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["codes"])
        names = set(file.keys())
        for name, entry in described.items():
            parts = {part: file.get_tensor(f"{name}:{part}") for part in _PARTS}
            parts |= {
                part: file.get_tensor(f"{name}:{part}")
                for part in _OPTIONAL
                if f"{name}:{part}" in names
            }
            stored = QuantizedTensor(**parts, scheme=Scheme(**entry["scheme"]))
            loaded[name] = WeightCodes.known(_layer(entry["layer"]), stored)
    return loaded


def _layer(value: Mapping[str, object]) -> Layer:
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return Layer(**lists)  # type: ignore[arg-type]  # as asdict made it
