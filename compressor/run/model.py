"""Open a spec's model, and those that passes name: structure first, weights when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compressor.errors import CompressorError, SpecError, located
from compressor.files import file_sha256
from compressor.graph.costs import cannot_run
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.checkpoint.folder import CARD, companions
from compressor.models.checkpoint.weight_files import weight_file_paths, weights_digest
from compressor.models.codec.headers import INDEX
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.onnx.file import external_files
from compressor.models.torch.carrier import TorchCarrier, open_module
from compressor.models.torch.lowering import OPSET
from compressor.models.torch.matching import check_checkpoint, held_tensors
from compressor.models.torch.program_module import (
    content_digest,
    open_program_module,
    program_module_digest,
    settings_digest,
)
from compressor.models.transformers.block_checkpoint import open_blocks
from compressor.models.transformers.carrier import (
    auto_class_name,
    library_version,
    open_pretrained,
)
from compressor.models.transformers.networks import CONFIG
from compressor.run.causal import check_lines
from compressor.run.lowered import KeptGraph, check_graph, kept_graph
from compressor.run.store import result_key
from compressor.spec.keys import InputKeys, ModelKeys
from compressor.spec.load import Spec, resolve_path
from compressor.spec.source_text import Document, KeyPath, dotted
from compressor.spec.user_code import code_digest, importable
from compressor.spec.validate import validate
from compressor.types.carrier import Capability, Carrier
from compressor.types.option_errors import SpecErrors
from compressor.types.tensors import Batch, TensorSpec

_FORMATS = {".onnx": "onnx", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class OpenedModel:
    """The float model of a spec.

    Attributes:
        carrier: the model; its weights are invalid before :meth:`load`.
        files: the files that were read, for the manifest.
        digest: returns the key of the model's content; reads the files.
        checkpoint: where the weights come from, if not from the factory or the ONNX file.
        where: place in the spec of the file that holds the weights.
        quick_digest: the same as ``digest`` from sizes, times and headers of the files, where that
            is possible.
        graph: where the graph of a PyTorch module is kept.
        part: the path of the module that it is in the network of the files, if not all of it.
    """

    carrier: Carrier
    files: tuple[Path, ...]
    digest: Callable[[], str]
    checkpoint: Path | None = None
    where: str = ""
    quick_digest: Callable[[], str] | None = None
    graph: KeptGraph | None = None
    part: str | None = None

    def keep_graph(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Keep the graph of a PyTorch module for the commands that follow.

        Args:
            note: called with one line if the graph that was kept is damaged.
        """
        if self.graph is not None and isinstance(self.carrier, TorchCarrier):
            self.graph.keep(self.carrier, note)

    def own_bytes(self, artifact_format: str) -> int | None:
        """Return the size of the user's files, if an artifact can be compared with them.

        That is where they are of its format, or where the model is not run but streamed. Files
        beside the weights of a directory count, since the artifact has them too.
        """
        if self.part is not None:
            return None
        formats = {_FORMATS.get(file.suffix) for file in self.files}
        if artifact_format in formats or Capability.RUN not in self.carrier.offers:
            folder = self.carrier.folder
            beside = () if folder is None else (*companions(folder).values(), folder / INDEX)
            own = (*self.files, *(p for p in beside if p.is_file() and p.name != CARD))
            return sum(file.stat().st_size for file in own)
        return None

    def load(self) -> None:
        """Read the weights and check every one of them.

        Raises:
            ModelError: they are unusable.
        """
        with located(self.where):
            if isinstance(self.carrier, OnnxCarrier):
                self.carrier.check_finite(f"model {str(self.files[0])!r}")
            if isinstance(self.carrier, TorchCarrier) and self.checkpoint is not None:
                self.carrier.load(self.checkpoint)

    def check_lowering(self, batch: Batch) -> None:
        """Check that the graph gives the outputs of the module or file that it came from.

        Raises:
            ModelError: their outputs differ.
            DataError: the module does not take the samples.
        """
        check_graph(self.carrier, self.files, batch)


def open_model(spec: Spec, *, fresh: bool = False) -> OpenedModel:
    """Open the structure of a spec's model and compare it with the checkpoint's header.

    Args:
        fresh: lower a module anew, even if its graph was kept.

    Raises:
        SpecError: a path is missing, or the factory does not work.
        ModelError: a file is unusable or does not fit.
    """
    if spec.onnx is not None:
        return _open_onnx(spec, spec.onnx)
    if spec.model.factory is None:
        return _open_checkpoint(spec)
    return _open_torch(spec, spec.model.factory, fresh=fresh)


def _open_checkpoint(spec: Spec) -> OpenedModel:
    assert spec.checkpoint is not None
    where = spec.where("model", "checkpoint")
    with located(where):
        carrier = open_checkpoint(spec.checkpoint)
        if spec.data and carrier.folder is not None:
            carrier = open_blocks(spec.checkpoint)
    return OpenedModel(
        carrier,
        carrier.files,
        lambda: result_key(
            "checkpoint", "", files=[file_sha256(f) for f in carrier.files], meaning=carrier.meaning
        ),
        spec.checkpoint,
        where,
        carrier.digest,
    )


def _open_onnx(spec: Spec, path: Path) -> OpenedModel:
    with located(spec.where("model", "onnx")):
        carrier = open_onnx(path, OPSET)
    files = (path, *external_files(path))
    declared = {s.name: s for s in spec.inputs}
    for actual in carrier.inputs:
        want = declared.pop(actual.name, None)
        if want is not None and not want.fits(actual):
            raise SpecError(
                f"model.inputs.{actual.name}",
                f"says {want}, the ONNX file has {actual}",
                "leave model.inputs out: the file knows its inputs",
                where=spec.where("model", "inputs", actual.name),
            )
    if declared:
        name = next(iter(declared))
        raise SpecError(
            f"model.inputs.{name}",
            "is not an input of the ONNX file",
            f"it has {', '.join(i.name for i in carrier.inputs)}",
            where=spec.where("model", "inputs", name),
        )
    return OpenedModel(
        carrier,
        files,
        lambda: result_key("onnx", "", files=[file_sha256(f) for f in files]),
        where=spec.where("model", "onnx"),
    )


def _open_torch(spec: Spec, factory: str, *, fresh: bool) -> OpenedModel:
    where = spec.where("model", "factory")
    auto_class = auto_class_name(factory)
    if auto_class is not None:
        try:
            return _open_pretrained(spec, auto_class, fresh=fresh)
        except CompressorError as error:
            key = error.subject if error.subject.startswith("model.") else "model.checkpoint"
            raise error.at(spec.where(*key.split("."))) from error.__cause__
    if spec.model.part is not None:
        raise SpecError(
            "model.part",
            f"belongs to an auto class of transformers, and factory is {factory!r}",
            "leave it out, and let the factory return that part",
            where=spec.where("model", "part"),
        )
    with located(where), importable([spec.folder]):
        function = spec.symbol(factory, "model.factory")
        if isinstance(function, torch.nn.Module):
            return _open_program_module(spec, function)
        torch.manual_seed(spec.seed)
        carrier = open_module(function, spec.model.config, spec.inputs, "model.factory")
    # A factory may read settings, or weights, from where only it knows.
    settings = settings_digest(carrier.module)
    own = content_digest(held_tensors(carrier.module)) if spec.checkpoint is None else None
    made = {"factory": factory, "config": dict(spec.model.config), "code": code_digest(function)}
    graph = kept_graph(spec.output, carrier, {**made, "seed": spec.seed, "settings": settings})
    carrier = carrier if fresh else graph.used_by(carrier)
    files: tuple[Path, ...] = ()
    where = spec.where("model", "checkpoint")
    if spec.checkpoint is not None:
        with located(where):
            files = weight_file_paths(spec.checkpoint)
            check_checkpoint(carrier.module, spec.checkpoint)

    def digest() -> str:
        weights = own if spec.checkpoint is None else weights_digest(spec.checkpoint)
        return result_key(
            "torch",
            "",
            factory=factory,
            config=dict(spec.model.config),
            code=code_digest(function),
            weights=weights,
            settings=settings,
            seed=spec.seed,
            inputs=[str(i) for i in spec.inputs],
        )

    return OpenedModel(carrier, files, digest, spec.checkpoint, where, graph=graph)


def _open_program_module(spec: Spec, module: torch.nn.Module) -> OpenedModel:
    carrier = open_program_module(module, spec.inputs, "model.factory")

    def digest() -> str:
        return result_key(
            "torch",
            "",
            code=code_digest(type(module)),
            module=program_module_digest(carrier),
            inputs=[str(i) for i in spec.inputs],
        )

    return OpenedModel(carrier, (), digest)


def _open_pretrained(spec: Spec, auto_class: str, *, fresh: bool) -> OpenedModel:
    directory = spec.checkpoint
    if directory is None:
        raise SpecError(
            "model.factory",
            f"'transformers.{auto_class}' builds a network from a folder, but none is set",
            "name the folder with config.json and the weights in model.checkpoint",
        )
    part = spec.model.part
    carrier = open_pretrained(auto_class, directory, spec.model.config, spec.inputs, part)
    if any(p.dtype == torch.bfloat16 for p in carrier.module.parameters()):
        raise SpecError(
            "model.checkpoint",
            "holds bfloat16 weights, which ONNX Runtime does not compute with on CPUs",
            "add config: {dtype: float32} to model, or use compress quantize, which runs nothing",
        )
    check_lines(spec, carrier.module, carrier.inputs)
    files = (directory / CONFIG, *weight_file_paths(directory))
    config = {"changes": dict(spec.model.config), "file": file_sha256(directory / CONFIG)}
    made = {"factory": auto_class, "config": config, "code": library_version()}
    graph = kept_graph(spec.output, carrier, made)
    carrier = carrier if fresh else graph.used_by(carrier)

    def digest() -> str:
        return result_key(
            "torch",
            "",
            factory=auto_class,
            config=dict(spec.model.config),
            part=part,
            code=library_version(),
            files=[file_sha256(file) for file in files],
            inputs=[str(i) for i in carrier.inputs],
        )

    where = spec.where("model", "checkpoint")
    return OpenedModel(carrier, files, digest, directory, where, graph=graph, part=part)


_MODEL = "model"


def open_other_model(
    spec: Spec, keys: Mapping[str, Any], path: KeyPath, inputs: Sequence[TensorSpec]
) -> OpenedModel:
    """Open the structure of a model that a spec names elsewhere than under ``model``.

    Args:
        spec: its folder is the base of relative paths and of the user's code.
        path: the place of the keys, such as ``("passes", 1, "teacher")``.
        inputs: the inputs of a factory's module, if the keys do not name them.

    Raises:
        SpecError: a key is wrong, a path is missing, the factory does not work, or the model
            cannot be run.
        ModelError: a file is unusable.
    """
    declared = validate(ModelKeys, dict(keys), spec.document, path)
    if declared.factory is not None and not declared.inputs:
        declared = declared.model_copy(update={"inputs": {i.name: _input_keys(i) for i in inputs}})
    # The document as if the keys at this path were under ``model``.
    lines = {
        (_MODEL, *place[len(path) :]): line
        for place, line in spec.document.lines.items()
        if place[: len(path)] == path
    }
    named = replace(
        spec,
        document=replace(spec.document, lines=lines or {(_MODEL,): _nearest(spec.document, path)}),
        model=declared,
        checkpoint=_file(spec, declared.checkpoint, (*path, "checkpoint")),
        onnx=_file(spec, declared.onnx, (*path, "onnx")),
    )
    with errors_at(path):
        opened = open_model(named)
    if Capability.RUN not in opened.carrier.offers:
        raise SpecError(
            dotted(path),
            f"cannot be used: {cannot_run(opened.carrier)}",
            "set factory and checkpoint, or onnx",
            where=spec.where(*path),
        )
    return opened


def option_path(index: int, option: str) -> KeyPath:
    """Return the place of a pass's option, such as ``teachers.0``, in a spec."""
    parts = (int(p) if p.isdigit() else p for p in option.split("."))
    return ("passes", index, *parts)


@contextmanager
def errors_at(path: KeyPath) -> Iterator[None]:
    """Make errors about ``model.checkpoint`` name the same key at another path of the spec."""
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
    return None if text is None else resolve_path(text, path, spec.document)


def _input_keys(spec: TensorSpec) -> InputKeys:
    shape = tuple(
        f"{spec.name}_{axis}" if length is None else length
        for axis, length in enumerate(spec.shape)
    )
    return InputKeys.model_construct(shape=shape, dtype=spec.dtype)


def _nearest(document: Document, path: KeyPath) -> int:
    while path and path not in document.lines:
        path = path[:-1]
    return document.lines.get(path, 1)
