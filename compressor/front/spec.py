"""Specs written in Python: typed, with completion in editors."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from compressor import catalog
from compressor.calibration.sources.iterables import TARGETS, as_array, first_item, parts, reader
from compressor.errors import SpecError
from compressor.models.torch.wrappers import unwrapped
from compressor.run.metrics.metrics import Metric
from compressor.spec.keys import LimitKeys, MetricKeys, ModelKeys
from compressor.spec.load import FACTORY, check_spec, load_spec
from compressor.spec.load import Spec as CheckedSpec
from compressor.spec.source_text import Document, KeyPath, dotted, override
from compressor.spec.user_code import HELD, reference_to
from compressor.types.arguments import check_arguments
from compressor.types.exporter import Exporter
from compressor.types.options import Options
from compressor.types.passes import Pass

ModelLike: TypeAlias = ModelKeys | Mapping[str, Any] | nn.Module | str | os.PathLike[str]
MetricLike: TypeAlias = str | MetricKeys | Metric | Mapping[str, Any] | Callable[..., Any]
PLACE = Path("spec in Python")  # in messages; its folder is the base of relative paths


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A spec with the keys of a file; paths are relative to the current folder.

    Passes, exports and other sections are objects of their classes, or dictionaries as in a file.
    Objects may stand in place of their names in a file: a module as the model, a DataLoader or
    another iterable as data, a function as metric, transform or loss. The manifest then says that
    no file can repeat the run.

    Example:
        >>> from compressor.passes import Fuse, QuantizeStatic
        >>> spec = compressor.Spec(
        ...     name="edge",
        ...     model={"onnx": "model.onnx"},
        ...     data={"calibration": {"npz": "calib.npz", "inputs": {"image": "image"}}},
        ...     passes=[Fuse(), QuantizeStatic()],
        ...     exports=[{"format": "onnx", "target": "ort-cpu"}],
        ... )

    Attributes:
        name: name of the result.
        model: the section ``model``, a module, or the path of an ONNX file or a checkpoint.
        exports: the artifacts to write.
        passes: the passes, in order.
        data: sources by role (``calibration``, ``evaluation``, ``training``); each is a section,
            a DataLoader, a Dataset, arrays, or an iterable of batches.
        metric: the name of a metric, a function of outputs and target, or a section.
        limits: limits that every artifact must keep.
        seed: seed of all random numbers.
        output: the output folder; by default ``out/NAME``.
    """

    name: str
    model: ModelLike
    exports: Sequence[Exporter | Mapping[str, Any]]
    passes: Sequence[Pass | Mapping[str, Any]] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    metric: MetricLike | None = None
    limits: LimitKeys | Mapping[str, Any] | None = None
    seed: int = 0
    output: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Refuse values of other types; what is in them is checked with the whole spec."""
        check_arguments(Spec, vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a file with this spec, without keys at their defaults.

        >>> compressor.Spec(name="a", model={"onnx": "m.onnx"}, exports=[OnnxExporter()]).to_dict()
        {'version': 1, 'name': 'a', 'model': {'onnx': 'm.onnx'}, 'exports': [{'format': 'onnx'}]}
        """
        value: dict[str, Any] = _Writer().plain(self._given(), ())
        return value

    def _given(self) -> dict[str, Any]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        left = {k for k, v in given.items() if v is None or (k != "exports" and v in (0, (), {}))}
        return {"version": 1} | {k: v for k, v in given.items() if k not in left}


SpecLike: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Spec | CheckedSpec
"""The path of a spec, its content as a dictionary, a typed spec, or a checked one."""


def checked(spec: SpecLike, settings: Sequence[str] = ()) -> CheckedSpec:
    """Check a spec; nothing that it names is opened, except data that show a module's inputs.

    Args:
        settings: overrides, as for ``--set``: ``passes.1.epochs=5``.

    Raises:
        SpecError: anything is wrong; independent errors come together as ``SpecErrors``.
        DataError: a program's data have no first batch.
    """
    if isinstance(spec, str | os.PathLike):
        return load_spec(Path(spec), settings)
    if isinstance(spec, CheckedSpec):
        return check_spec(override(spec.document, settings), spec.objects) if settings else spec
    writer = _Writer()
    value = writer.plain(spec._given() if isinstance(spec, Spec) else spec, ())
    _add_inputs(value, writer.objects)
    return check_spec(override(Document(PLACE, value), settings), writer.objects)


class _Writer:
    """Converts a spec to the content of a file, with references in place of objects.

    Attributes:
        objects: the objects by reference.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def plain(self, value: Any, path: KeyPath) -> Any:
        """Return dictionaries, lists and scalars."""
        if isinstance(value, Options):
            value = _keys(value)
        if isinstance(value, nn.Module):
            value = unwrapped(value)
        if isinstance(value, Metric):
            value = _known("metric", value.name, value)
        if path == ("model",) and isinstance(value, str | os.PathLike):
            value = {"onnx" if Path(value).suffix == ".onnx" else "checkpoint": value}
        if path[:1] == ("data",) and len(path) == 2 and not is_section(value):
            value = {FACTORY: value}
        if isinstance(value, nn.Module) and path[-1:] != (FACTORY,):
            value = {FACTORY: value}
        if path[:1] == ("data",) and path[2:] == (FACTORY,) and not _is_reference(value):
            # An iterator can be read once, and data are read several times.
            once = isinstance(value, Iterator)
            return self._reference(list(reader(value, dotted(path[:2]))()) if once else value, path)
        if isinstance(value, Mapping):
            return {str(key): self.plain(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item, (*path, number)) for number, item in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, np.generic):
            return value.item()
        return value if isinstance(value, _SCALARS) else self._reference(value, path)

    def _reference(self, value: Any, path: KeyPath) -> str:
        """Return the import path of an object, or a reference that stands for it.

        Raises:
            SpecError: what reads this place takes no object.
        """
        data = path[:1] == ("data",) and path[2:] == (FACTORY,)
        # The keywords of a factory would reach it as references.
        keywords = "config" in path[:-1]
        if keywords or not (data or callable(value)):
            raise SpecError(
                dotted(path),
                f"is an object of {type(value).__name__}",
                "give plain values as a file has them" + ("" if keywords else ", or a function"),
            )
        if callable(value) and not isinstance(value, nn.Module):
            imported = reference_to(value)
            if imported is not None:
                return imported
        reference = f"{HELD}:{dotted(path)}"
        self.objects[reference] = value
        return reference


def _is_reference(value: Any) -> bool:
    """Whether data are given as a function's import path, which has a colon."""
    return isinstance(value, str) and ":" in value


_SCALARS = (type(None), bool, int, float, str)


def _keys(options: Options) -> dict[str, Any]:
    """Return the keys that were set in a declaration, and the name of its pass or format.

    Raises:
        SpecError: it has no name in a spec.
    """
    given = {
        info.alias or name: getattr(options, name)
        for name, info in type(options).model_fields.items()
        if name in options.model_fields_set
    }
    if isinstance(options, Pass):
        return {"pass": _known("pass", options.name, type(options)), **given}
    if isinstance(options, Exporter):
        return {"format": _known("exporter", options.format, type(options)), **given}
    return given


def _known(kind: catalog.Kind, name: str, given: type | Metric) -> str:
    """Return the name of a pass, an exporter or a metric if a spec finds it by that name.

    Raises:
        SpecError: there is no such name, or it is that of another one.
    """
    found = catalog.load(kind, name) if name in catalog.names(kind) else None
    if found != given:
        raise SpecError(
            f"{kind} {name!r}",
            "is not what a spec finds by that name"
            if found
            else "has no entry point, by which a spec finds it",
            f"name it under {catalog.GROUPS[kind]} in its package, and install that",
        )
    return name


def is_section(value: Any) -> bool:
    """Whether data are given as the section of a file."""
    return isinstance(value, Mapping) and not {*catalog.names("source"), FACTORY}.isdisjoint(value)


def _add_inputs(value: dict[str, Any], objects: Mapping[str, Any]) -> None:
    """Add the inputs of a program's module if they are missing and its data show them."""
    model, data = value.get("model"), value.get("data")
    if not isinstance(model, dict) or model.get("inputs") or not isinstance(data, dict):
        return
    module = objects.get(str(model.get(FACTORY)))
    for role in ("calibration", "evaluation", "training"):
        entry = data.get(role) or {}
        items = objects.get(str(entry.get(FACTORY)))
        if isinstance(module, nn.Module) and items is not None and "transform" not in entry:
            name = f"data.{role}"
            first = first_item(reader(items, name), name, value.get("seed", 0))
            model["inputs"] = _inputs(module, first, entry.get("target"), name)
            return


def _inputs(module: nn.Module, item: Any, target: Any, name: str) -> dict[str, Any]:
    """Return the inputs of a module according to a batch, in the order of its forward.

    Raises:
        SpecError: forward has no parameter with a name in the dictionary.
    """
    taken = inspect.signature(module.forward).parameters.values()
    named = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = {p.name for p in taken if p.default is p.empty}
    needed = sum(p.name in required for p in named)
    length = len(item) if isinstance(item, tuple | list) else 1
    # What comes after the inputs that forward needs is the target, where there is anything.
    count = length if length <= needed else max(1, min(length - 1, len(named)))
    first, _ = parts(item, count)
    if isinstance(first, Mapping):
        any_name = not named and any(p.kind == p.VAR_KEYWORD for p in taken)
        values = first if any_name else {p.name: first[p.name] for p in taken if p.name in first}
        others = {*TARGETS} - required | {target}  # one that forward needs is an input
        chosen = {n: v for n, v in values.items() if n not in others} or values
    else:
        chosen = {p.name: v for p, v in zip(named, first, strict=False)}
    if not chosen:
        raise SpecError(
            "model.inputs",
            f"is not given, and forward of {type(module).__name__} takes nothing of the first "
            f"batch of {name}",
            f"its parameters are {', '.join(p.name for p in taken) or 'none'}; name its inputs: "
            "model={'factory': module, 'inputs': {'image': {'shape': ['batch', 3, 32, 32]}}}",
        )
    floats = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    made = {}
    for key, content in chosen.items():
        array = as_array(content, f"data {name!r}", key)
        dtype = str(floats).removeprefix("torch.") if array.dtype.kind == "f" else array.dtype.name
        made[key] = {"shape": ["batch", *array.shape[1:]], "dtype": dtype}
    return made
