"""Inspect what the safetensors exporter writes: ``model.json`` with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
from onnx_ir import tensor_adapters
from safetensors import safe_open

from compressor.graph.as_json import graph_from_json
from compressor.inspection.contents import ModelContents
from compressor.inspection.graph import inspect_graph
from compressor.loading import DESCRIPTION, FORMAT, load
from compressor.progress import Progress


def compressed_folder(path: Path) -> Path | None:
    """Return the folder of the compressed model that ``path`` is or belongs to, if there is one.

    Args:
        path: the folder, its ``model.json``, or the weights that this names.
    """
    folder = path if path.is_dir() else path.parent
    try:
        document = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    belongs = path.is_dir() or path.name in (DESCRIPTION, document.get("weights"))
    return folder if belongs else None


def inspect_compressed(folder: Path, progress: Progress) -> ModelContents:
    """Describe a compressed model.

    Raises:
        ModelError: a file is missing, cut or edited.
    """
    import onnx_ir.passes.common as common

    load(folder)  # which checks that both files are whole and belong together
    description = folder / DESCRIPTION
    document = json.loads(description.read_text(encoding="utf-8"))
    weights = folder / document["weights"]
    model = graph_from_json(document["graph"], f"model {str(description)!r}")
    with safe_open(weights, framework="pt") as file:
        for name, value in model.graph.initializers.items():
            stored = tensor_adapters.TorchTensor(file.get_tensor(name), name=name)
            value.const_value = _elements(stored, value, document["tensors"][name])
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    files = {p.name: p.stat().st_size for p in (weights, description)}
    return inspect_graph(model, "compressed model", str(folder), files, progress)


def _elements(
    stored: ir.TensorProtocol, value: ir.Value, entry: dict[str, object]
) -> ir.TensorProtocol:
    """Return the tensor itself where several elements were packed into a byte."""
    if "packed" not in entry or value.dtype is None or value.shape is None:
        return stored
    shape = ir.Shape([int(d) for d in value.shape.numpy()])
    return ir.PackedTensor(stored.numpy(), value.dtype, shape=shape, name=value.name)
