"""Inspect what the safetensors exporter writes: ``model.json`` with its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from compressor.inspection.contents import ModelContents, TensorRow
from compressor.inspection.graph import inspect_graph
from compressor.models.codec import DESCRIPTION, FORMAT, INDEX, check
from compressor.models.codec.description import Description, read_description
from compressor.models.codec.weight_files import read_tensors, stored_headers
from compressor.models.executor.lazy import computed
from compressor.progress import Progress
from compressor.types.tensors import Array


def compressed_folder(path: Path) -> Path | None:
    """Return the folder of the compressed model that ``path`` is or belongs to, if there is one.

    Args:
        path: the folder, its ``model.json``, or weights or an index that this names.
    """
    folder = path if path.is_dir() else path.parent
    document = _mapping(folder / DESCRIPTION)
    if document.get("format") != FORMAT:
        return None
    weights = document.get("weights")
    shards = _mapping(folder / INDEX).get("weight_map") if weights == INDEX else None
    names = [DESCRIPTION, weights, *(shards.values() if isinstance(shards, dict) else ())]
    return folder if path.is_dir() or path.name in names else None


def inspect_compressed(folder: Path, progress: Progress) -> ModelContents:
    """Describe a compressed model.

    Raises:
        ModelError: a file is missing, cut or edited.
    """
    import onnx_ir.passes.common as common

    check(folder)  # that all files are whole and belong together
    description = read_description(folder / DESCRIPTION)
    headers = stored_headers(description, folder)
    tensors = read_tensors(description, headers, mapped=True)
    model = description.model()
    for name, value in model.graph.initializers.items():
        value.const_value = _elements(name, tensors[name], description.tensors[name].dtype)
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    names = [description.weights, *(header.path.name for header in headers), DESCRIPTION]
    files = {name: (folder / name).stat().st_size for name in dict.fromkeys(names)}
    found = inspect_graph(model, "compressed model", str(folder), files, progress)
    sizes = {t.name: t.nbytes for header in headers for t in header.tensors.values()}
    rows = tuple(_stored(row, description, sizes) for row in found.tensors)
    return replace(found, tensors=rows)


def _mapping(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _stored(row: TensorRow, description: Description, sizes: dict[str, int]) -> TensorRow:
    """Say of a tensor how it is stored, and in how many bytes."""
    entry = description.tensors.get(row.name)
    if entry is None:  # a constant of a node
        return row
    nbytes = sum(sizes[part] for part in entry.parts(row.name))
    return replace(row, bytes=nbytes, storage=str(entry.form or ""))


def _elements(name: str, tensor: torch.Tensor, dtype: ir.DataType) -> ir.TensorProtocol:
    def read() -> ir.TensorProtocol:
        return ir.Tensor(_array(computed(tensor), dtype), dtype=dtype)

    return ir.LazyTensor(read, dtype, ir.Shape(tensor.shape), name=name)


def _array(tensor: torch.Tensor, dtype: ir.DataType) -> Array:
    """Return elements as an array of the type's own numpy dtype."""
    held = dtype.numpy()
    if dtype.bitwidth < 8:  # one a byte
        held = np.dtype(np.int8 if dtype.is_signed() else np.uint8)
        held = np.dtype(ml_dtypes.float8_e4m3fn) if dtype.is_floating_point() else held
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(held)
    return flat.reshape(tensor.shape).astype(dtype.numpy(), copy=False)
