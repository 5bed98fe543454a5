"""Read an ONNX file as it is, with whatever opset and operators it has."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from compressor.errors import ModelError
from compressor.inspection.contents import ModelContents
from compressor.inspection.graph import inspect_graph
from compressor.progress import Progress


def inspect_onnx(path: Path, progress: Progress) -> ModelContents:
    """Describe an ONNX file and its external data.

    Raises:
        ModelError: it is cut, or not ONNX.
    """
    import onnx_ir.passes.common as common

    model = read_onnx(path)
    files = {path.name: path.stat().st_size}
    for name in _external_files(model, path):
        files[name] = (path.parent / name).stat().st_size
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    return inspect_graph(model, "ONNX model", str(path), files, progress)


def read_onnx(path: Path) -> ir.Model:
    """Read an ONNX file; its external data is mapped, not read.

    Raises:
        ModelError: it is cut, or not ONNX.
    """
    subject = f"model {str(path)!r}"
    remedy = "the file is cut or of another format"
    try:
        model = ir.load(path)
    except (DecodeError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(subject, "is not an ONNX file", remedy) from error
    if not len(model.graph) or not model.opset_imports:
        raise ModelError(subject, "holds no graph", remedy)
    return model


def _external_files(model: ir.Model, path: Path) -> list[str]:
    """Return the names of the external data files.

    Raises:
        ModelError: one is missing, too short, or outside the model's folder.
    """
    folder = path.parent.resolve()
    names = set()
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        file = (folder / tensor.location).resolve()
        end = (tensor.offset or 0) + (tensor.length or 0)
        whole = file.is_relative_to(folder) and file.is_file() and file.stat().st_size >= end
        if not whole:
            raise ModelError(
                f"model {str(path)!r}",
                f"external data file {str(tensor.location)!r} is missing, cut, or outside its "
                "folder",
                "copy it beside the model again",
            )
        names.add(str(tensor.location))
    return sorted(names)
