"""What is in checkpoints of all kinds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ModelError, SpecError
from compressor.lab.inspect.contents import ModelContents, TensorRow, contents_json
from compressor.lab.inspect.path import inspect_path
from compressor.report.pages.inspect import contents_page
from compressor.report.terminal import plain_text


def inspected(path: Path) -> ModelContents:
    contents = inspect_path(path)
    assert isinstance(contents, ModelContents)
    return contents


def rows(contents: ModelContents) -> dict[str, TensorRow]:
    return {row.name: row for row in contents.tensors}


def test_zeros_parameters_and_bytes(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, 0.0], [-0.0, 3.0]])
    tensors = {"a.weight": weight, "a.steps": torch.tensor(0), "b": torch.ones(4).half()}
    torch.save(tensors, tmp_path / "m.pt")
    save_file(tensors, tmp_path / "m.safetensors")
    for name in ("m.pt", "m.safetensors"):
        contents = inspected(tmp_path / name)
        assert rows(contents)["a.weight"] == TensorRow("a.weight", (2, 2), "float32", 16, 50.0)
        assert rows(contents)["a.steps"] == TensorRow("a.steps", (), "int64", 8, 100.0)
        assert contents.parameters == 8
        assert contents.zeros == 25.0
        assert contents.bytes_by_dtype == {"float32": 16, "float16": 8, "int64": 8}
        assert contents.files == {name: (tmp_path / name).stat().st_size}
        assert contents.graph is None


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        (torch.bfloat16, "bfloat16", 8),
        (torch.float8_e4m3fn, "float8_e4m3fn", 4),
        (torch.float8_e5m2, "float8_e5m2", 4),
        (torch.float64, "float64", 32),
        (torch.int8, "int8", 4),
        (torch.bool, "bool", 4),
    ],
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype, name: str, size: int) -> None:
    save_file({"w": torch.tensor([0.0, 1.0, 1.0, 1.0]).to(dtype)}, tmp_path / "m.safetensors")
    assert inspected(tmp_path / "m.safetensors").tensors == (
        TensorRow("w", (4,), name, size, 25.0),
    )


def test_four_bit_floats_are_counted_one_by_one(tmp_path: Path) -> None:
    packed = torch.tensor([[0x10, 0x22]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"w": packed}, tmp_path / "m.safetensors")
    contents = inspected(tmp_path / "m.safetensors")
    assert contents.tensors == (TensorRow("w", (1, 4), "float4_e2m1fn", 2, 25.0),)
    assert contents.parameters == 4


def test_shards_of_a_folder(tmp_path: Path) -> None:
    for index in (1, 2):
        save_file({f"w{index}": torch.ones(2, 3)}, tmp_path / f"model-{index}.safetensors")
    mapping = {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": mapping}))
    contents = inspected(tmp_path)
    assert list(rows(contents)) == ["w1", "w2"]
    assert set(contents.files) == set(mapping.values())
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names a missing shard 'model-2\.safetensors'"):
        inspected(tmp_path)


COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("config", "weight", "scale", "words"),
    [
        (
            COMPRESSED_TENSORS,
            "weight_packed",
            "weight_scale",
            "compressed-tensors, pack-quantized, 4 bits, group 128",
        ),
        (GPTQ, "qweight", "scales", "gptq, 4 bits, group 128"),
    ],
)
def test_quantized_hugging_face_folders(
    tmp_path: Path, config: dict[str, Any], weight: str, scale: str, words: str
) -> None:
    tensors = {
        f"layer.{weight}": torch.zeros(8, 32, dtype=torch.int32),
        f"layer.{scale}": torch.ones(8, 2).half(),
        "norm.weight": torch.ones(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    contents = inspected(tmp_path)
    assert contents.quantization == words
    assert contents.parameters == 8 * 256 + 5
    assert f"quantization: {words}\n" in plain_text(contents_page(contents))


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([float("nan"), 1.0, float("-inf")])}, tmp_path / "m.safetensors")
    contents = inspected(tmp_path / "m.safetensors")
    assert contents.notes == ("'w' holds 2 values that are NaN or infinite",)
    assert plain_text(contents_page(contents)).endswith("- " + contents.notes[0] + "\n")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = {"w": torch.eye(10), "count": torch.tensor(3)}
    save_file(tensors, Path("m.safetensors"))
    contents = inspected(Path("m.safetensors"))
    assert plain_text(contents_page(contents)).splitlines() == [
        "checkpoint m.safetensors",
        f"files: m.safetensors {Path('m.safetensors').stat().st_size} B",
        "",
        "tensor   shape    dtype      size     zeros",
        "───────────────────────────────────────────",
        "count    scalar   int64       8 B    0.00 %",
        "w        10×10    float32   400 B   90.00 %",
        "",
        "Total: 2 tensors, 100 parameters (90.00 % zeros), 408 B (float32 400 B, int64 8 B)",
    ]
    document = json.loads(json.dumps(contents_json(contents)))
    assert document["bytes"] == 408
    assert document["tensors"][1]["shape"] == [10, 10]


class Runs:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    (tmp_path / "words.pt").write_text("words")
    torch.save({"w": Runs()}, tmp_path / "code.pt")
    for name in ("cut.safetensors", "words.pt", "code.pt"):
        with pytest.raises(ModelError, match=name):
            inspected(tmp_path / name)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "gone.pt"):
        with pytest.raises(SpecError, match=name):
            inspected(tmp_path / name)


def test_engines_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "m.engine").write_bytes(b"ptrt")
    with pytest.raises(Exception, match="inspect the ONNX file that it was built from"):
        inspected(tmp_path / "m.engine")
