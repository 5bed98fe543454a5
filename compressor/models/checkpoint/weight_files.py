"""Read weight files: safetensors and PyTorch pickles, the latter never executing anything."""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from compressor.errors import ModelError, SpecError
from compressor.files import file_sha256
from compressor.models.checkpoint.folder import read_shards, shard_paths
from compressor.models.codec.headers import (
    DTYPES,
    PAIRS,
    POINTER,
    TensorHeader,
    pointer_error,
)

PICKLES = (".pt", ".pth", ".th", ".bin", ".ckpt")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "module", "weights")
_PREFIXES = ("module.", "_orig_mod.")
_AVERAGED = "n_averaged"  # the count of torch.optim.swa_utils.AveragedModel
_REFUSED = re.compile(r"GLOBAL (\S+)|unrecognized function|allowlisted|must be imported")
_CALLS = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE"})
_DAMAGED = (  # what PyTorch raises for missing or wrong bytes, found by trial
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
)


def weight_file_paths(path: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights at ``path``: itself, or a directory's shards.

    Raises:
        SpecError: the path is missing or of an unknown kind.
        ModelError: an index is malformed or names a missing shard.
    """
    if not path.exists():
        raise SpecError(f"checkpoint {str(path)!r}", "does not exist", "check model.checkpoint")
    if path.is_dir():
        return shard_paths(path)[0]
    if path.suffix not in (*PICKLES, ".safetensors"):
        raise SpecError(
            f"checkpoint {str(path)!r}",
            f"has the unknown suffix {path.suffix!r}",
            "name it as model.onnx"
            if path.suffix == ".onnx"
            else f"give a .safetensors, {', '.join(PICKLES[:-1])} or {PICKLES[-1]} file, or a "
            "directory of safetensors",
        )
    return (path,)


def weights_digest(path: Path) -> str:
    """Hash the content of all weight files at ``path``."""
    return "".join(file_sha256(p) for p in weight_file_paths(path))


def read_weights(path: Path, *, headers_only: bool = False) -> dict[str, torch.Tensor]:
    """Read named tensors from a file or directory.

    Safetensors and zipped pickles are memory-mapped. With ``headers_only`` the tensors lie on the
    ``meta`` device: shapes and dtypes without data.

    Raises:
        ModelError: a file is truncated, not a weight file, or would have to run code.
    """
    files = weight_file_paths(path)
    if files[0].suffix == ".safetensors":
        return _read_safetensors(path, headers_only)
    (file,) = files
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise pointer_error(f"checkpoint {str(file)!r}")
    return _read_pickle(file, headers_only)


def _read_safetensors(path: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in read_shards(path):
        if headers_only:
            tensors.update({n: _described(header) for n, header in shard.tensors.items()})
            continue
        try:
            with safe_open(shard.path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in shard.tensors})
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"checkpoint {str(shard.path)!r}",
                f"cannot be read ({error})",
                "the file is truncated or damaged",
            ) from error
    return tensors


def _described(header: TensorHeader) -> torch.Tensor:
    if header.dtype == PAIRS:
        shape = (*header.shape[:-1], header.shape[-1] // 2)
        return torch.empty(shape, dtype=torch.float4_e2m1fn_x2, device="meta")
    return torch.empty(header.shape, dtype=DTYPES[header.dtype], device="meta")


def _read_pickle(path: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    device = "meta" if headers_only else "cpu"
    try:
        mapped = not headers_only and zipfile.is_zipfile(path)
        with warnings.catch_warnings(action="ignore"):  # of pickles that it will refuse anyway
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        refused = _REFUSED.search(str(error))
        if refused is not None or _calls_something(path):
            what = refused[1] if refused is not None and refused[1] else "objects"
            raise ModelError(
                f"checkpoint {str(path)!r}",
                f"holds {what}, which would run code when opened",
                "save the state_dict alone: torch.save(model.state_dict(), path)",
            ) from error
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise ModelError(
            f"checkpoint {str(path)!r}",
            f"is not a PyTorch file ({reason or 'its pickle is malformed'})",
            "give the file that torch.save wrote, or save it again",
        ) from error
    except _DAMAGED as error:
        if _is_script(path):
            raise ModelError(
                f"checkpoint {str(path)!r}",
                "is a TorchScript archive, which holds code beside the weights",
                "save its state_dict alone: torch.save(torch.jit.load(archive).state_dict(), path)",
            ) from error
        sentence = str(error).partition("\n")[0].partition(". ")[0][:160]
        raise ModelError(
            f"checkpoint {str(path)!r}",
            f"cannot be read ({sentence or type(error).__name__})",
            "the file is truncated or damaged",
        ) from error
    return state_dict_of(content, f"checkpoint {str(path)!r}")


def _calls_something(path: Path) -> bool:
    """Whether a file is a plain pickle of objects; it is only parsed, nothing is run."""
    try:
        with path.open("rb") as stream:
            return any(operation.name in _CALLS for operation, _, _ in pickletools.genops(stream))
    except (ValueError, EOFError, struct.error, OverflowError):  # not a pickle after all
        return False


def _is_script(path: Path) -> bool:
    """Whether a file is what ``torch.jit.save`` wrote."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except _DAMAGED:
        return False


def state_dict_of(content: Any, subject: str) -> dict[str, torch.Tensor]:
    """Return the tensors of what a training script saved, without wrappers' prefixes.

    Raises:
        ModelError: there is no mapping of names to tensors.
    """
    level = content
    while isinstance(level, Mapping) and not _is_state_dict(level):
        inner = next((k for k in _WRAPPERS if isinstance(level.get(k), Mapping)), None)
        if inner is None:
            break
        level = level[inner]
    if not isinstance(level, Mapping) or not _is_state_dict(level):
        keys = sorted(str(k) for k in level) if isinstance(level, Mapping) else []
        raise ModelError(
            subject,
            f"has no state_dict (found {', '.join(keys[:6]) or type(content).__name__})",
            "save model.state_dict(), alone or under the key 'state_dict'",
        )
    names = dict(level)
    if len(names) > 1 and all(n.startswith(_PREFIXES[0]) for n in names if n != _AVERAGED):
        names.pop(_AVERAGED, None)
    while prefix := next((p for p in _PREFIXES if all(n.startswith(p) for n in names)), None):
        names = {n.removeprefix(prefix): t for n, t in names.items()}
    return names


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items()
    )
