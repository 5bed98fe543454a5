"""An engine without a good manifest is refused; no TensorRT is needed for it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import InputError, ModelError
from compressor.lab.inspect.contents import EngineContents
from compressor.lab.inspect.path import inspect_path
from compressor.report.pages.inspect import contents_page
from compressor.report.terminal import plain_text
from compressor.types.proofs import sealed_text


def document(engine: bytes) -> dict[str, Any]:
    row = {"name": "e\x1b[31m", "type": "gemm", "precision": "int8", "nodes": ["fc"]}
    tensors = {"inputs": ["int8[?, 4]"], "constants": ["int8[4, 2]"], "outputs": ["float32[?, 2]"]}
    return {
        "kind": "tensorrt-engine",
        "engine": {"bytes": len(engine), "sha256": sha256(engine).hexdigest()},
        "builder": "rtx",
        "versions": {"tensorrt-rtx": "1"},
        "compute_capabilities": None,
        "profiles": {"x": {"min": [1, 4], "opt": [8, 4], "max": [9, 4]}},
        "inputs": ["x float32[batch, 4]"],
        "outputs": ["y float32[batch, 2]"],
        "layers": [{**row, **tensors}],
        "quantized": [{"layer": "fc", "meant": "int8", "computed": "int8"}],
    }


def written(folder: Path, content: Any, engine: bytes = b"engine") -> Path:
    path = folder / "model.engine"
    path.write_bytes(engine)
    text = content if isinstance(content, str) else sealed_text(content)
    path.with_name("model.engine.json").write_text(text, encoding="utf-8")
    return path


def test_a_manifest_is_shown_without_control_characters(tmp_path: Path) -> None:
    found = inspect_path(written(tmp_path, document(b"engine")))
    assert isinstance(found, EngineContents)
    assert found.intact
    shown = plain_text(contents_page(found))
    assert "\x1b" not in shown
    assert "compute capabilities: not named" in shown
    assert "Total: 1 layer (int8 1), 1 of 1 quantized layers computed with codes" in shown


def test_another_engine(tmp_path: Path) -> None:
    found = inspect_path(written(tmp_path, document(b"engine"), b"another"))
    assert not found.intact
    assert "does not match this manifest" in plain_text(contents_page(found))


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in document(b"engine").items() if k != key}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not that of a TensorRT engine"),
        (without("kind"), "is not that of a TensorRT engine"),
        (without("layers"), "is not that of a TensorRT engine"),
        ({**document(b"engine"), "engine": "x"}, "is not that of a TensorRT engine"),
    ],
)
def test_a_manifest_that_is_none(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        inspect_path(written(tmp_path, content))


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path, document(b"engine"))
    path.with_name("model.engine.json").rename(tmp_path / "kept")
    with pytest.raises(InputError, match=r"without its manifest.* put model\.engine\.json beside"):
        inspect_path(path)
    (tmp_path / "kept").rename(tmp_path / "model.engine.json")
    path.unlink()
    with pytest.raises(ModelError, match=r"is of 'model\.engine', which is missing"):
        inspect_path(tmp_path / "model.engine.json")
