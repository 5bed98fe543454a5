"""Read an ONNX file as it is, with whatever opset and operators it has."""

from __future__ import annotations

from pathlib import Path

from compressor.inspection.contents import ModelContents
from compressor.inspection.graph import inspect_graph
from compressor.models.onnx.file import external_files, read_onnx
from compressor.progress import Progress


def inspect_onnx(path: Path, progress: Progress) -> ModelContents:
    """Describe an ONNX file and its external data.

    Raises:
        ModelError: it is cut, not ONNX, or breaks ONNX's rules.
    """
    import onnx_ir.passes.common as common

    model = read_onnx(path)
    files = {path.name: path.stat().st_size}
    for file in external_files(path):
        files[str(file.relative_to(path.parent))] = file.stat().st_size
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    return inspect_graph(model, "ONNX model", str(path), files, progress)
