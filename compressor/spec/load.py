"""Load a spec: read, override, validate, and resolve names and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from compressor import catalog
from compressor.calibration.sources.file_source import PathSource
from compressor.errors import CompressorError, SpecError, close_names, listed, suggestion
from compressor.spec.keys import (
    FEEDS,
    DataKeys,
    DataSection,
    LimitKeys,
    MetricKeys,
    ModelKeys,
    SpecKeys,
)
from compressor.spec.source_text import Document, KeyPath, override, read_document
from compressor.spec.user_code import importable, load_symbol
from compressor.spec.validate import validate
from compressor.types.exporter import Exporter
from compressor.types.option_errors import SpecErrors, keys_of
from compressor.types.options import Options
from compressor.types.passes import Pass, TrainPass
from compressor.types.tensors import TensorSpec

ResultT = TypeVar("ResultT")
FACTORY = "factory"
_OF_FEEDS = ("npz", FACTORY)
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True)
class DataEntry:
    """One data source of a spec, its paths resolved."""

    role: str  # `calibration`, `evaluation`, `training` or `search`
    kind: str  # a source's name in the catalog, or `factory`
    options: Options | None  # the declaration of its kind; `None` for a factory
    reference: str | None  # the factory's `package.module:function`
    keys: DataKeys
    where: str


@dataclass(frozen=True)
class Spec:
    """A checked spec with everything resolved."""

    document: Document  # the text it came from, for messages
    name: str
    seed: int
    model: ModelKeys
    checkpoint: Path | None
    onnx: Path | None
    data: Mapping[str, DataEntry]
    metric: str | MetricKeys | None
    passes: tuple[Pass, ...]
    exports: tuple[Exporter, ...]
    limits: LimitKeys
    output: Path
    # all keys with their defaults, paths as written; goes into the manifest
    resolved: Mapping[str, Any]
    # what a Python program gave in place of names, by the reference that stands for it
    objects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return self.document.folder

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The model inputs that the spec declares."""
        return tuple(TensorSpec(n, i.shape, i.dtype) for n, i in self.model.inputs.items())

    def symbol(self, reference: str, key: str) -> Any:
        """Return what a reference names: an object that was given, or else what is imported.

        Args:
            key: the key that it stands under, for messages.

        Raises:
            SpecError: it is malformed, does not import, or is not callable.
        """
        if reference in self.objects:
            return self.objects[reference]
        with importable([self.folder]):
            return load_symbol(reference, key)

    def where(self, *path: str | int) -> str:
        """Return ``file:line`` of a key."""
        return self.document.where(path)


def load_spec(path: Path, settings: Sequence[str] = ()) -> Spec:
    """Read and check a spec; nothing it names is opened yet.

    >>> load_spec(Path("samples/digits/spec.yaml"), ["seed=7"]).seed
    7

    Args:
        settings: overrides, ``passes.1.epochs=5``.

    Raises:
        SpecError: anything is wrong; independent errors come together as ``SpecErrors``.
    """
    return check_spec(override(read_document(path), settings))


def check_spec(document: Document, objects: Mapping[str, Any] | None = None) -> Spec:
    """Check a spec that has been read; nothing it names is opened yet.

    Args:
        objects: what references in it stand for, where they are not imported.

    Raises:
        SpecError: as :func:`load_spec`.
    """
    errors: list[SpecError] = []

    def attempt(function: Callable[..., ResultT], *args: Any) -> ResultT | None:
        try:
            return function(*args)
        except SpecErrors as problems:
            errors.extend(problems.errors)
        except SpecError as error:
            errors.append(error)
        return None

    keys = attempt(validate, SpecKeys, document.value, document, ())
    # What lies below is checked even where these are wrong: independent errors come together.
    declare = [
        [attempt(_declaration, section, kind, i, document) for i in _mappings(document, section)]
        for section, kind in (("passes", "pass"), ("exports", "exporter"))
    ]
    data = {
        role: attempt(data_entry, role, value, document)
        for role, value in _data_values(document).items()
    }
    if keys is None:
        raise _together(errors)
    files = {
        key: attempt(resolve_path, text, ("model", key), document)
        for key, text in (("checkpoint", keys.model.checkpoint), ("onnx", keys.model.onnx))
        if text is not None
    }
    output = attempt(resolve_path, keys.output or f"out/{keys.name}", ("output",), document)
    if errors:
        raise _together(errors)
    passes = tuple(p for p in declare[0] if isinstance(p, Pass))
    exports = tuple(e for e in declare[1] if isinstance(e, Exporter))
    assert output is not None
    return Spec(
        document=document,
        name=keys.name,
        seed=keys.seed,
        model=keys.model,
        checkpoint=files.get("checkpoint"),
        onnx=files.get("onnx"),
        data={role: entry for role, entry in data.items() if entry is not None},
        metric=keys.metric,
        passes=passes,
        exports=exports,
        limits=keys.limits,
        output=output,
        resolved=_resolved(keys, passes, exports),
        objects=objects or {},
    )


def _together(errors: Sequence[SpecError]) -> SpecError:
    """Return one error for all; several sections read the paths of the model."""
    different = list({str(error): error for error in errors}.values())
    return different[0] if len(different) == 1 else SpecErrors(different)


def _mappings(document: Document, section: str) -> list[int]:
    """Return the indices of a list's entries that are mappings, as they should all be."""
    value = document.value.get(section)
    items = value if isinstance(value, list) else []
    return [index for index, item in enumerate(items) if isinstance(item, dict)]


def _declaration(section: str, kind: catalog.Kind, index: int, document: Document) -> Any:
    path: KeyPath = (section, index)
    value = dict(document.value[section][index])
    key = "pass" if kind == "pass" else "format"
    name = value.pop(key, None)
    if not isinstance(name, str):
        near = [given for given in value if close_names(given, [key], 1)]
        if name is None and near:
            raise document.error((*path, near[0]), "is not a known key", f"did you mean {key!r}?")
        names = ", ".join(catalog.names(kind))
        raise document.error(path, f"has no {key!r}", f"there are: {names}")
    try:
        cls = catalog.load(kind, name)
    except CompressorError as error:
        raise error.at(document.where((*path, key))) from None
    return validate(cls, value, document, path)


def _data_values(document: Document) -> dict[str, dict[str, Any]]:
    section = document.value.get("data")
    values = section if isinstance(section, dict) else {}
    return {r: values[r] for r in DataSection.model_fields if isinstance(values.get(r), dict)}


def data_entry(role: str, value: dict[str, Any], document: Document) -> DataEntry:
    """Check a data source of a spec.

    Args:
        value: what stands under ``data`` for the role.

    Raises:
        SpecError: a key is wrong, or a file does not exist.
    """
    path: KeyPath = ("data", role)
    kind = _source_kind(value, document, path)
    common = {k: v for k, v in value.items() if k in keys_of(DataKeys)}
    options = {k: v for k, v in value.items() if k not in common and k != kind}
    keys = validate(DataKeys, common, document, path)
    where = document.where((*path, kind))
    if keys.samples == FEEDS and (kind not in _OF_FEEDS or role == "training"):
        remedy = f"feeds come from {' or '.join(_OF_FEEDS)}, for calibration and evaluation"
        raise document.error((*path, "samples"), f"is {FEEDS!r} for {role} from {kind}", remedy)
    if not isinstance(value[kind], str):
        raise document.error((*path, kind), f"is {value[kind]!r}", "give a string")
    if kind == FACTORY:
        _refuse_unknown(options, keys_of(DataKeys), document, path)
        return DataEntry(role, kind, None, value[kind], keys, where)
    location = resolve_path(value[kind], (*path, kind), document)
    if kind == "npz" and keys.samples != FEEDS and location.is_dir():
        remedy = f"name an npz file, or add samples: {FEEDS} to take each file in it as one sample"
        raise document.error((*path, kind), f"{str(location)!r} is a folder", remedy)
    if not location.exists():
        problem = f"{str(location)!r} does not exist"
        raise document.error((*path, kind), problem, "correct the path")
    cls = catalog.load("source", kind)
    _refuse_unknown(options, [*keys_of(cls), *keys_of(DataKeys)], document, path)
    filled = {
        "path": str(location),
        "fields": _fields(keys),
        **_resolved_options(cls, options, document, path),
    }
    if isinstance(keys.samples, int) and keys.fold is None:  # which counts its own
        filled["samples"] = keys.samples
    return DataEntry(role, kind, validate(cls, filled, document, path), None, keys, where)


def _source_kind(value: Mapping[str, Any], document: Document, path: KeyPath) -> str:
    """Return the one key of a data section that names its source."""
    kinds = (*catalog.names("source"), FACTORY)
    named = [k for k in kinds if k in value]
    if len(named) == 1:
        return named[0]
    what = f"names {listed(named)} together" if named else "names no source"
    unknown = [k for k in value if k not in (*kinds, *keys_of(DataKeys))]
    hint = suggestion(unknown[0], kinds) if unknown else f"give one of {', '.join(kinds)}"
    raise document.error(path, what, hint)


def _fields(keys: DataKeys) -> dict[str, str]:
    """Return names in the source by names in a batch; the target keeps its own name."""
    fields = dict(keys.inputs)
    if keys.target is not None and fields:  # without any, all arrays are read
        fields[keys.target] = keys.target
    return fields


def _resolved_options(
    cls: type[Options], options: Mapping[str, Any], document: Document, path: KeyPath
) -> Mapping[str, Any]:
    """Return a source's further options, with paths resolved and what the model's folder adds."""
    paths = {
        key: str(resolve_path(options[key], (*path, key), document))
        for key, field in zip(keys_of(cls), cls.model_fields.values(), strict=True)
        if Path in (field.annotation, *get_args(field.annotation))
        and isinstance(options.get(key), str)
    }
    resolved = {**options, **paths}
    model = _model_folder(document)
    return cls.completed(resolved, model) if model and issubclass(cls, PathSource) else resolved


def _model_folder(document: Document) -> Path | None:
    """Return the folder that holds the model's files; ``None`` if the spec names none."""
    section = document.value.get("model")
    for key in ("checkpoint", "onnx"):
        text = section.get(key) if isinstance(section, dict) else None
        if isinstance(text, str):
            place = resolve_path(text, ("model", key), document)
            return place if place.is_dir() else place.parent
    return None


def _refuse_unknown(
    options: Mapping[str, Any], keys: Sequence[str], document: Document, path: KeyPath
) -> None:
    hidden = {"path", "fields"}
    shown = [k for k in dict.fromkeys(keys) if k not in hidden]
    for key in options:
        if key not in shown:
            raise document.error((*path, key), "is not a known key", suggestion(key, shown))


def resolve_path(text: str, key: KeyPath, document: Document) -> Path:
    """Resolve a path of the spec: environment variables (``$$`` is a dollar), ``~``, relative.

    Raises:
        SpecError: a variable is not set; the error names the key.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name is None:
            return "$"
        if name not in os.environ:
            problem = f"uses the environment variable {name}, which is not set"
            raise document.error(
                key, problem, f"export {name}=/path, or write $$ for a dollar sign"
            )
        return os.environ[name]

    # pathlib would take ./~name for ~name, and raise where there is no such user.
    expanded = os.path.expanduser(_VARIABLE.sub(value_of, text))  # noqa: PTH111
    return _without_parents(document.folder / expanded)


def _without_parents(path: Path) -> Path:
    """Return a path without ``..``, which is the folder around what a link before it leads to."""
    parts = path.parts
    count = max((i + 1 for i, part in enumerate(parts) if part == ".."), default=0)
    return Path(os.path.realpath(Path(*parts[:count])), *parts[count:]) if count else path


def _resolved(
    keys: SpecKeys, passes: Sequence[Pass], exports: Sequence[Exporter]
) -> dict[str, Any]:
    plain: dict[str, Any] = keys.model_dump(mode="json", by_alias=True)
    if not any(isinstance(p, TrainPass) and p.searches for p in passes):
        del plain["data"]["search"]  # no result depends on it
    plain["passes"] = [{"pass": p.name, **p.model_dump(mode="json", by_alias=True)} for p in passes]
    plain["exports"] = [
        {"format": e.format, **e.model_dump(mode="json", by_alias=True)} for e in exports
    ]
    return plain
