"""What is in a GGUF file, and which files are none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from compressor.errors import ArtifactError, ModelError
from compressor.exporters.gguf.header import TYPES
from compressor.exporters.gguf.reading import GgufFile
from compressor.lab.inspect.contents import ModelContents, TensorRow, contents_json
from compressor.lab.inspect.path import inspect_path
from compressor.report.pages.inspect import contents_page
from compressor.report.terminal import plain_text

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

HALVES = torch.tensor([[0.0, 1.0, float("inf"), -0.0]] * 8).half()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a file that the library wrote."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope", float("nan"))
    writer.add_bool("llama.flag", True)
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(20)])
    writer.add_array("short", [1, 2])
    writer.add_chat_template("one\ntwo " * 40)
    writer.add_tensor("a.weight", HALVES.numpy())
    packed = torch.arange(2 * 2 * 18, dtype=torch.uint8).reshape(2, 36).numpy()
    writer.add_tensor("b.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def inspected(data: bytes, folder: Path) -> ModelContents:
    path = folder / "m.gguf"
    path.write_bytes(data)
    contents = inspect_path(path)
    assert isinstance(contents, ModelContents)
    return contents


def test_tensors_and_metadata(whole: bytes, tmp_path: Path) -> None:
    contents = inspected(whole, tmp_path)
    assert contents.kind == "GGUF file"
    assert contents.tensors == (
        TensorRow("a.weight", (8, 4), "F16", 64, 50.0),
        TensorRow("b.weight", (2, 64), "Q4_0", 72, None, "4.5 bits"),
    )
    assert contents.parameters == 160
    assert contents.zeros == 50.0
    assert contents.quantization == "4.5 bits in 128 of 160 weights"
    assert contents.notes == ("'a.weight' holds 8 values that are NaN or infinite",)
    metadata = contents.metadata
    assert metadata["llama.block_count"] == 3
    assert metadata["llama.rope"] == "nan"
    assert metadata["llama.flag"] is True
    assert metadata["short"] == [1, 2]
    assert metadata["tokenizer.ggml.tokens"] == "20 values"
    document = json.loads(json.dumps(contents_json(contents), allow_nan=False))
    assert document["metadata"]["general.architecture"] == "llama"
    assert document["bytes_by_dtype"] == {"Q4_0": 72, "F16": 64}
    shown = plain_text(contents_page(contents))
    assert "general.architecture" in shown
    assert "one two one two" in shown
    assert max(map(len, shown.splitlines())) < 150


def test_types_are_those_of_the_library() -> None:
    sizes = {
        kind.value: (kind.name, *size)
        for kind, size in gguf.GGML_QUANT_SIZES.items()
        if kind.value in TYPES
    }
    assert sizes == TYPES


def _number(data: bytes, at: int, form: str, value: int) -> bytes:
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def _after(data: bytes, name: str, beyond: int) -> int:
    return data.index(name.encode()) + len(name) + beyond


def test_damaged_files_are_refused(whole: bytes, tmp_path: Path) -> None:
    count = _after(whole, "tokenizer.ggml.tokens", 8)
    short = _after(whole, "short", 0)
    axes, b_axes = _after(whole, "a.weight", 0), _after(whole, "b.weight", 0)
    damaged = {
        "begins with b'GGUX'": b"GGUX" + whole[4:],
        "of version 9": _number(whole, 4, "<I", 9),
        "fewer than 1,099,511,627,776 tensors": _number(whole, 8, "<Q", 1 << 40),
        "fewer than 1,099,511,627,776 entries": _number(whole, 16, "<Q", 1 << 40),
        "in its header": whole[:12],
        "texts of 'tokenizer.ggml.tokens'": _number(whole, count, "<Q", 1 << 62),
        # An array of numbers that the library would count to the end of time.
        "values of 'short'": _number(whole, short + 8, "<Q", 1 << 62),
        "array of the unknown type 9": _number(whole, short + 4, "<I", 9),
        "'short' of the unknown type 13": _number(whole, short, "<I", 13),
        "twice": whole.replace(b"llama.flag", b"llama.rope"),
        "with 5,000 axes": _number(whole, axes, "<I", 5000),
        "of the unknown type 77": _number(whole, axes + 4 + 16, "<I", 77),
        "in blocks of 32": _number(whole, b_axes + 4, "<Q", 63),
        "where another one is": _number(whole, b_axes + 4 + 16 + 4, "<Q", 32),
        "two tensors of one name": whole.replace(b"b.weight", b"a.weight"),
        "and tensor 'b.weight' at": whole[:-40],
    }
    for problem, data in damaged.items():
        with pytest.raises(ModelError) as caught:
            inspected(data, tmp_path)
        assert problem in str(caught.value), problem


def test_alignment_is_a_power_of_two(tmp_path: Path) -> None:
    def file(alignment: int) -> bytes:
        key = b"general.alignment"
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, alignment)
        tensor = struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 2, 0, 0)
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + entry + tensor
        return head + bytes(-len(head) % 64) + struct.pack("<ff", 0, 1)

    assert inspected(file(64), tmp_path).zeros == 50.0
    for alignment in (0, 1, 48):
        with pytest.raises(ModelError, match=f"has {alignment} as general.alignment"):
            inspected(file(alignment), tmp_path)


def test_a_count_beyond_the_file_does_not_keep_the_library_busy(
    whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_number(whole, _after(whole, "short", 8), "<Q", 1 << 62))
    with pytest.raises(ArtifactError, match="fewer than 4,611,686,018,427,387,904 values"):
        GgufFile(path)
