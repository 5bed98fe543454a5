"""Small files to put into archives, and archives of them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from compressor.exporters.archive.exporter import pack
from compressor.exporters.archive.unpacking import ArchiveFormat
from compressor.types.tensors import Array

Tensors = dict[str, tuple[str, Array]]
unpack = ArchiveFormat().unpack
stored_bytes = ArchiveFormat().stored_bytes


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def mixed_tensors(count: int = 1100) -> Tensors:
    """Floats, sparse floats, codes, masks and small integers: name to type and array."""
    draw = rng()
    values = draw.standard_normal(count).astype(np.float32)
    sparse = np.where(draw.random(count) < 0.8, np.float32(0), values)
    codes = np.clip(draw.normal(8, 2, 2 * count), 0, 15).astype(np.uint8)
    return {
        "fc.weight": ("F32", values),
        "fc.sparse": ("F32", sparse),
        "half": ("F16", values.astype(np.float16)),
        "brain": ("BF16", values.astype(ml_dtypes.bfloat16)),
        "wide": ("F64", values.astype(np.float64)),
        "codes": ("U8", codes[::2] | codes[1::2] << 4),
        "bytes": ("I8", np.clip(values * 30, -127, 127).astype(np.int8)),
        "zeros": ("I8", np.zeros(8 * count, np.int8)),
        "shape": ("I64", np.array([1, -1, 64])),
        "scalar": ("F32", np.array(0.5, np.float32)),
        "empty": ("F32", np.zeros((0, 4), np.float32)),
    }


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """Write a safetensors file by hand, in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "note": "é"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def small_files(folder: Path) -> list[Path]:
    """Write a file of tensors and one of text."""
    text = folder / "model.json"
    text.write_text(json.dumps({"format": "compressor", "nodes": ["Conv"] * 40}))
    return [write_safetensors(folder / "model.safetensors", mixed_tensors()), text]


def packed(files: list[Path], target: Path, level: int = 9) -> Path:
    """Put files into an archive."""
    pack(files, target, level, lambda _: None)
    return target
