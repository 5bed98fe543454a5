"""Write and read Core ML packages: a program, its weights and a list of both."""

from __future__ import annotations

import hashlib
import io
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
import onnx_ir as ir
from coremltools.libmilstoragepython import _BlobStorageReader

from compressor.errors import ArtifactError, SpecError, first_line
from compressor.exporters.torch_program.export import TorchProgram, exported, interface
from compressor.files import scratch
from compressor.progress import quiet_libraries
from compressor.types.tensors import Array

_PROGRAM = "Data/com.apple.CoreML/model.mlmodel"
_WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
_MANIFEST = "Manifest.json"
_STORED = "constexpr_affine_dequantize"
_NOTE = "compressor"
_DATE = "com.github.apple.coremltools.conversion_date"


def content(model: ir.Model, notes: str, precision: str) -> dict[str, bytes]:
    """Return a package's files by their paths in it.

    Args:
        notes: who wrote it.
        precision: ``float16`` or ``float32``, of what is not codes.

    Raises:
        SpecError: Core ML Tools do not convert a node.
    """
    program = exported(model, planned=False, alone=True)
    with quiet_libraries(), redirect_stderr(io.StringIO()), scratch() as folder:
        converted = _converted(program, precision)
        path = folder / "model.mlpackage"
        converted.save(str(path))
        description = _described(coremltools.models.utils.load_spec(str(path)), model, notes)
        weights = path / _WEIGHTS
        data = weights.read_bytes() if weights.is_file() else b""
    files = {_PROGRAM: description, _WEIGHTS: data}
    return {_MANIFEST: _manifest(files), **files}


def stored_codes(folder: Path) -> Counter[bytes]:
    """Return the codes of all quantized weights of a package.

    Raises:
        ArtifactError: it cannot be read.
    """
    with quiet_libraries():
        try:
            spec = coremltools.models.utils.load_spec(str(folder))
            weights = folder / _WEIGHTS
            reader = _BlobStorageReader(str(weights))
            return Counter(_codes(op, reader).tobytes() for op in _operations(spec, _STORED))
        except (RuntimeError, ValueError, OSError, KeyError, StopIteration) as error:
            raise ArtifactError(
                f"artifact {folder.name!r}", f"Core ML Tools do not read it ({first_line(error)})",
                "export it again",
            ) from error  # fmt: skip


def expected_codes(model: ir.Model) -> Counter[bytes]:
    """Return the codes of all weights that a graph's package should have."""
    program = exported(model, planned=False, alone=True).program
    held = {**program.state_dict, **program.constants}
    return Counter(
        np.ascontiguousarray(tensor.numpy()).tobytes()
        for tensor in held.values()
        if str(tensor.dtype) == "torch.int8"
    )


def _converted(program: TorchProgram, precision: str) -> Any:
    try:
        return coremltools.convert(
            program.program.run_decompositions({}),
            minimum_deployment_target=coremltools.target.iOS17,
            compute_precision=coremltools.precision(precision),
            skip_model_load=True,
        )
    except (RuntimeError, ValueError, NotImplementedError, KeyError, AssertionError) as error:
        raise SpecError(
            "export coreml", f"Core ML Tools do not convert it ({first_line(error)})",
            "export onnx instead",
        ) from error  # fmt: skip


def _described(spec: Any, model: ir.Model, notes: str) -> bytes:
    """Give inputs and outputs the names that the model has for them."""
    for features, values in (
        (spec.description.input, model.graph.inputs),
        (spec.description.output, model.graph.outputs),
    ):
        names = [str(entry["name"]) for entry in interface(values)]
        for feature, name in zip(list(features), names, strict=True):
            coremltools.models.utils.rename_feature(spec, feature.name, name)
    noted = spec.description.metadata.userDefined
    noted.pop(_DATE, None)  # the same model gives the same bytes on any day
    noted[_NOTE] = notes
    return bytes(spec.SerializeToString(deterministic=True))


def _manifest(files: dict[str, bytes]) -> bytes:
    """Return the list of a package's parts, whose identifiers follow from what they hold."""
    parts = {
        _PROGRAM: ("com.apple.CoreML/model.mlmodel", "CoreML Model Specification"),
        _WEIGHTS: ("com.apple.CoreML/weights", "CoreML Model Weights"),
    }
    entries = {}
    for file, (path, about) in parts.items():
        digest = hashlib.sha256(files[file]).hexdigest()
        entries[str(uuid.uuid5(uuid.NAMESPACE_OID, path + digest))] = {
            "author": "com.apple.CoreML", "description": about,
            "name": path.rpartition("/")[2], "path": path,
        }  # fmt: skip
    root = next(iter(entries))
    manifest = {
        "fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": root,
    }  # fmt: skip
    return (json.dumps(manifest, indent=4, sort_keys=True) + "\n").encode()


def _operations(spec: Any, kind: str) -> Iterator[Any]:
    for function in spec.mlProgram.functions.values():
        for op in function.block_specializations[function.opset].operations:
            if op.type == kind:
                yield op


def _codes(op: Any, reader: Any) -> Array:
    value = op.attributes["quantized_data"]
    if value.WhichOneof("value") == "blobFileValue":
        return np.asarray(reader.read_int8_data(value.blobFileValue.offset))
    return np.frombuffer(value.immediateValue.tensor.bytes.values, np.int8)
