"""Which files of a folder make up a checkpoint: its shards, and what else belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compressor.carriers.checkpoint.headers import read_json
from compressor.errors import ModelError, SpecError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
    single = folder / SINGLE
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


def read_index(index: Path) -> dict[str, str]:
    """Read an index and check that all shards are there.

    Raises:
        ModelError: it is malformed, or names a file that is missing or lies elsewhere.
    """
    subject = f"index {str(index)!r}"
    content = read_json(index, subject, "is not a safetensors index")
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapping, dict):
        raise ModelError(subject, "is not a safetensors index", "write it again")
    shards = {name: str(shard) for name, shard in mapping.items()}
    for shard in sorted(set(shards.values())):
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ModelError(
                subject,
                f"names a shard outside its folder, {shard!r}",
                "keep shards beside the index",
            )
        if not (index.parent / shard).is_file():
            raise ModelError(subject, f"names a missing shard {shard!r}", "fetch it")
    return shards


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
