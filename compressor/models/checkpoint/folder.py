"""A checkpoint's files: shards, index and companions, checked by their headers before any data is
read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compressor.errors import ModelError, SpecError
from compressor.models.checkpoint.config import read_config
from compressor.models.codec.headers import (
    INDEX,
    WEIGHTS,
    ShardHeader,
    TensorHeader,
    read_header,
    read_index,
)

CONFIG = "config.json"

# Text, vocabularies and templates, and a model's own code, which is copied and never run.
_COMPANIONS = {".json", ".jinja", ".md", ".model", ".py", ".spm", ".tiktoken", ".txt", ".vocab"}
_LEGAL = ("LICENSE", "NOTICE", "USE_POLICY")
# What describes the weights that are left behind, or a run of this tool.
_LEFT_BEHIND = {"manifest.json", "model.json", "report.json", "report.md"}


def shard_paths(folder: Path) -> tuple[tuple[Path, ...], Mapping[str, str] | None]:
    """Return the shards of a folder, sorted, and its index: the shard's name for each tensor.

    An index says which files count. Without one, ``model.safetensors`` beside a ``config.json``
    is the model, as ``transformers`` has it, and all safetensors files together otherwise.

    Raises:
        SpecError: there is no safetensors file.
        ModelError: the index is malformed, or names a file that is missing or lies elsewhere.
    """
    index = folder / INDEX
    if index.is_file():
        mapping = read_index(index)
        return tuple(folder / name for name in sorted(set(mapping.values()))), mapping
    single = folder / WEIGHTS
    if single.is_file() and (folder / CONFIG).is_file():
        return (single,), None
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise SpecError(
            f"checkpoint {str(folder)!r}",
            "holds no .safetensors file",
            "name the weight file itself",
        )
    return files, None


def companions(folder: Path) -> tuple[Path, ...]:
    """Return the files that belong to a checkpoint besides its weights, sorted by name.

    Configuration, tokenizer, templates, licence: small files at the top of the folder. Weights of
    other formats (``pytorch_model.bin``, ``original/``) are none of them.
    """
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and path.name not in _LEFT_BEHIND
        and (path.suffix in _COMPANIONS or path.name.startswith(_LEGAL))
    )


@dataclass(frozen=True)
class Checkpoint:
    """Safetensors files that belong together.

    Attributes:
        path: what was opened, a file or a folder.
        folder: the folder whose configuration and tokenizer belong to it, if there is one.
        shards: the headers of its files.
        config: the content of ``config.json``; empty without one.
    """

    path: Path
    folder: Path | None
    shards: tuple[ShardHeader, ...]
    config: Mapping[str, Any]

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        """All tensors by name, in the order of storage."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}


def read_shards(path: Path) -> tuple[ShardHeader, ...]:
    """Read the headers of a file, or of all shards of a folder, and compare them with its index.

    Raises:
        SpecError: there are no safetensors files.
        ModelError: a file is cut or damaged, the index and the shards disagree, or a tensor is in
            two shards.
    """
    paths, index = shard_paths(path) if path.is_dir() else ((path,), None)
    shards = tuple(read_header(file) for file in paths)
    held: dict[str, str] = {}
    for shard in shards:
        name = shard.path.relative_to(path).as_posix() if path.is_dir() else shard.path.name
        for tensor in shard.tensors:
            if tensor in held:
                raise ModelError(
                    f"checkpoint {str(path)!r}",
                    f"has tensor {tensor!r} in two files, {held[tensor]!r} and {name!r}",
                    "remove one of them",
                )
            held[tensor] = name
    if index is not None:
        _check_index(path / INDEX, index, held)
    return shards


def _check_index(path: Path, index: Mapping[str, str], held: Mapping[str, str]) -> None:
    subject = f"index {str(path)!r}"
    remedy = "the index belongs to other files; fetch both again"
    for tensor, shard in index.items():
        if tensor not in held:
            raise ModelError(
                subject, f"places {tensor!r} in {shard!r}, which does not hold it", remedy
            )
        if Path(shard) != Path(held[tensor]):
            raise ModelError(
                subject, f"places {tensor!r} in {shard!r}, it is in {held[tensor]!r}", remedy
            )
    for tensor, shard in held.items():
        if tensor not in index:
            raise ModelError(subject, f"does not name {tensor!r}, which {shard!r} holds", remedy)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read all headers of a checkpoint, and its ``config.json``.

    A file that is all there is of a Hugging Face folder stands for that folder.

    Raises:
        SpecError: the path is missing, or holds no safetensors.
        ModelError: something is damaged, or index and shards disagree.
    """
    subject = f"checkpoint {str(path)!r}"
    if not path.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    if path.is_file() and path.suffix != ".safetensors":
        remedy = "save the weights with safetensors, or write a spec that gives model.factory too"
        if path.suffix == ".onnx":
            remedy = "write a spec with model.onnx; `compress init` starts one"
        raise SpecError(subject, "is not a .safetensors file", remedy)
    folder = _model_folder(path)
    shards = read_shards(path)
    if not any(shard.tensors for shard in shards):
        raise ModelError(subject, "holds no tensors", "save it again")
    config = {} if folder is None else read_config(folder / CONFIG)
    return Checkpoint(path, folder, shards, config)


def _model_folder(path: Path) -> Path | None:
    if path.is_dir():
        return path if (path / CONFIG).is_file() else None
    folder = path.parent
    if not (folder / CONFIG).is_file() or (folder / INDEX).is_file():
        return None
    return folder if shard_paths(folder)[0] == (path,) else None
