"""Models beside the run's own, such as teachers, that an option of a pass names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError, SpecError
from compressor.models.sizes import cannot_run
from compressor.run.model import OpenedModel, open_model
from compressor.spec.keys import InputKeys, ModelKeys
from compressor.spec.load import Spec, resolve_path
from compressor.spec.source_text import Document, KeyPath
from compressor.spec.validate import SpecErrors, dotted, validate
from compressor.types.carrier import Capability
from compressor.types.tensors import TensorSpec

_MODEL = "model"


def open_other_model(
    spec: Spec, keys: Mapping[str, Any], path: KeyPath, inputs: Sequence[TensorSpec]
) -> OpenedModel:
    """Open the structure of a model that stands elsewhere in a spec than under ``model``.

    Args:
        spec: relative paths and the user's code are found from its folder.
        keys: as under ``model``.
        path: where they stand, such as ``("passes", 1, "teacher")``.
        inputs: what a factory's module takes if the keys do not say.

    Raises:
        SpecError: a key is wrong, a path is missing, the factory does not work, or the model
            cannot be run.
        ModelError: a file is unusable.
    """
    own = validate(ModelKeys, dict(keys), spec.document, path)
    if own.factory is not None and not own.inputs:
        own = own.model_copy(update={"inputs": {i.name: _input_keys(i) for i in inputs}})
    named = replace(
        spec,
        document=_as_model(spec.document, path),
        model=own,
        checkpoint=_file(spec, own.checkpoint, (*path, "checkpoint")),
        onnx=_file(spec, own.onnx, (*path, "onnx")),
    )
    with errors_at(path):
        opened = open_model(named)
    if Capability.RUN not in opened.carrier.offers:
        raise SpecError(
            dotted(path),
            f"is of no use: {cannot_run(opened.carrier)}",
            "give factory and checkpoint, or onnx",
            where=spec.where(*path),
        )
    return opened


def option_path(index: int, option: str) -> KeyPath:
    """Return the place of a pass's option, such as ``teachers.0``, in a spec."""
    parts = (int(p) if p.isdigit() else p for p in option.split("."))
    return ("passes", index, *parts)


@contextmanager
def errors_at(path: KeyPath) -> Iterator[None]:
    """Let errors that speak of ``model.checkpoint`` speak of the same key at another place."""
    try:
        yield
    except SpecErrors:
        raise
    except CompressorError as error:
        head, dot, key = error.subject.partition(".")
        if head != _MODEL or not dot:
            raise
        subject = f"{dotted(path)}.{key}"
        raise type(error)(
            subject, error.problem, error.remedy, where=error.where
        ) from error.__cause__


def _file(spec: Spec, text: str | None, path: KeyPath) -> Path | None:
    return resolve_path(text, spec.folder, path, spec.document)


def _input_keys(spec: TensorSpec) -> InputKeys:
    shape = tuple(
        f"{spec.name}_{axis}" if length is None else length
        for axis, length in enumerate(spec.shape)
    )
    return InputKeys.model_construct(shape=shape, dtype=spec.dtype)


def _as_model(document: Document, path: KeyPath) -> Document:
    """Return the document as if what stands at a path stood under ``model``."""
    lines = {
        (_MODEL, *place[len(path) :]): line
        for place, line in document.lines.items()
        if place[: len(path)] == path
    }
    return replace(document, lines=lines or {(_MODEL,): _nearest(document, path)})


def _nearest(document: Document, path: KeyPath) -> int:
    while path and path not in document.lines:
        path = path[:-1]
    return document.lines.get(path, 1)
