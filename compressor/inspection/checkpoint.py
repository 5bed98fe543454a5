"""Inspect checkpoints: files of named tensors without a graph."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from safetensors import SafetensorError, safe_open

from compressor.carriers.weight_files import read_weights, weight_file_paths
from compressor.errors import ModelError
from compressor.inspection.contents import ModelContents, TensorRow
from compressor.inspection.tensors import (
    count_not_finite,
    count_zeros,
    not_finite_note,
    percent,
)
from compressor.progress import Progress

# How the weights of quantized Hugging Face checkpoints and their helpers are called.
_PACKED = ("weight_packed", "qweight")
_HELPERS = (
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "scales",
    "qzeros",
    "g_idx",
)


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint; its elements are read when they are asked for."""

    name: str
    tensor: ir.TensorProtocol


def inspect_checkpoint(path: Path, progress: Progress) -> ModelContents:
    """Describe a weight file or a directory of them.

    Raises:
        SpecError: it holds no weight files.
        ModelError: a file is cut or not a weight file.
    """
    files = weight_file_paths(path)
    quantization, bits = _quantization(path if path.is_dir() else path.parent)
    rows: list[TensorRow] = []
    notes: list[str] = []
    weights = zeros = known = 0
    with progress.stage("read tensors") as advance:
        for stored in (s for file in files for s in _stored(file)):
            count = count_zeros(stored.tensor)
            rows.append(_row(stored, count))
            bad = count_not_finite(stored.tensor)
            if bad:
                notes.append(not_finite_note(stored.name, bad))
            own = _weights(stored, bits)
            weights += own
            if own == stored.tensor.size and count is not None:
                zeros, known = zeros + count, known + own
            advance(len(rows))
    return ModelContents(
        kind="checkpoint",
        path=str(path),
        files={f.name: f.stat().st_size for f in files},
        tensors=tuple(rows),
        parameters=weights,
        zeros=percent(zeros, known),
        quantization=quantization,
        notes=tuple(notes),
    )


def headers(path: Path) -> tuple[int, int]:
    """Return the number of tensors and of parameters in a checkpoint, reading little of it.

    Raises:
        SpecError: it holds no weight files.
        ModelError: a file is cut or not a weight file.
    """
    tensors = read_weights(path, headers_only=True)
    return len(tensors), sum(t.numel() for t in tensors.values() if t.is_floating_point())


def _stored(file: Path) -> Iterator[Stored]:
    if file.suffix != ".safetensors":
        for name, tensor in read_weights(file).items():
            yield Stored(name, _adapted(name, tensor))
        return
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield Stored(name, _adapted(name, opened.get_tensor(name)))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"checkpoint {str(file)!r}", f"cannot be read ({error})", "the file is cut or damaged"
        ) from error


def _adapted(name: str, tensor: torch.Tensor) -> ir.TensorProtocol:
    if tensor.dtype == torch.float4_e2m1fn_x2:
        codes = tensor.contiguous().view(torch.uint8).numpy()
        shape = ir.Shape([*tensor.shape[:-1], 2 * tensor.shape[-1]])
        return ir.PackedTensor(codes, ir.DataType.FLOAT4E2M1, shape=shape, name=name)
    return tensor_adapters.TorchTensor(tensor.detach().contiguous(), name=name)


def _row(stored: Stored, zeros: int | None) -> TensorRow:
    tensor = stored.tensor
    return TensorRow(
        name=stored.name,
        shape=tuple(int(d) for d in np.asarray(tensor.shape.numpy())),
        dtype=tensor.dtype.numpy().name,
        bytes=tensor.nbytes,
        zeros=None if zeros is None else percent(zeros, tensor.size),
    )


def _weights(stored: Stored, bits: int | None) -> int:
    """Return how many weights a tensor holds: none, if it is a scale or a counter."""
    last = stored.name.rpartition(".")[2]
    if last in _HELPERS:
        return 0
    if last in _PACKED and bits:
        return stored.tensor.nbytes * 8 // bits
    codes = bits is not None and last == "weight"
    return stored.tensor.size if codes or stored.tensor.dtype.is_floating_point() else 0


def _quantization(folder: Path) -> tuple[str, int | None]:
    """Read ``quantization_config`` of a Hugging Face folder: in words, and bits of a weight."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "", None
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        return "", None
    weights = _weight_scheme(found)
    bits = weights.get("num_bits", found.get("bits", found.get("w_bit")))
    group = weights.get("group_size", found.get("group_size", found.get("q_group_size")))
    parts = [str(found.get(key)) for key in ("quant_method", "format") if found.get(key)]
    parts += [f"{bits} bits"] if bits else []
    parts += [f"group {group}"] if group and group != -1 else []
    return ", ".join(parts), bits if isinstance(bits, int) else None


def _weight_scheme(config: dict[str, Any]) -> dict[str, Any]:
    """Return the weights' scheme of the first group of layers in compressed-tensors' layout."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    first = next((group for group in groups.values() if isinstance(group, dict)), {})
    weights = first.get("weights")
    return weights if isinstance(weights, dict) else {}
