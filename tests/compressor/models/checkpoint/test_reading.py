"""Parts of files as tensors, mapped or loaded."""

from __future__ import annotations

from os import fsync  # as it is before tests begin, which then wait for no disk
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compressor.errors import ModelError
from compressor.models.checkpoint.reading import Buffer, FileTensor, MappedFile, RowReader
from compressor.models.codec.headers import DTYPES, read_header


def opened(path: Path) -> dict[str, FileTensor]:
    header = read_header(path)
    file = MappedFile(path, header.nbytes)
    return {name: FileTensor(file, tensor) for name, tensor in header.tensors.items()}


def test_tensors_of_all_dtypes_and_any_alignment(tmp_path: Path) -> None:
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "none": torch.zeros(0, 4)}
    for name, dtype in DTYPES.items():
        if dtype != torch.complex64:
            tensors[name] = torch.arange(6).to(torch.float32).to(dtype).reshape(2, 3)
    tensors["scalar"] = torch.tensor(7)
    save_file(tensors, tmp_path / "m.safetensors")
    for name, tensor in opened(tmp_path / "m.safetensors").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(
            tensor().reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8)
        )
        assert tensor().shape == tensors[name].shape


@settings(deadline=None)
@given(first=st.integers(0, 20), second=st.integers(0, 20))
def test_rows_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, first: int, second: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "m.safetensors"
    whole = torch.arange(20 * 6, dtype=torch.int16).reshape(20, 2, 3)
    save_file({"a": torch.zeros(5), "w": whole}, path)
    tensor = opened(path)["w"]
    assert isinstance(tensor, RowReader)
    start, stop = sorted((first, second))
    assert torch.equal(tensor.rows(start, stop), whole[start:stop])
    span = tensor.span(start, stop)
    data = path.read_bytes()[span.start : span.stop]
    assert data == whole[start:stop].numpy().tobytes()


def test_what_was_released_is_read_again(tmp_path: Path) -> None:
    whole = torch.randn(4096, 16)
    save_file({"w": whole}, tmp_path / "m.safetensors")
    tensor = opened(tmp_path / "m.safetensors")["w"]
    view = tensor()
    assert torch.equal(view, whole)
    span = tensor.span(10, 4000)
    span.file.release(span.start, span.stop)
    assert torch.equal(view, whole)


def test_the_file_is_never_written_to(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(10)}, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    opened(tmp_path / "m.safetensors")["w"]().add_(1)
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(10)}, path)
    tensor = opened(path)["w"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="has changed since its header was read"):
        tensor()
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        tensor()


def test_touching_reads_every_page(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "m.safetensors")
    tensor = opened(tmp_path / "m.safetensors")["w"]
    span = tensor.span(0, 1 << 20)

    def mapped() -> int:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").split("m.safetensors")[1]
        return next(int(x.split()[1]) for x in lines.splitlines() if x.startswith("Rss:"))

    span.file.touch(span.start, span.start)
    span.file.touch(span.start, span.stop)
    assert mapped() >= 4096
    span.file.release(span.start, span.stop)
    assert mapped() <= 8


def test_a_loaded_range_is_read_from_its_buffer(tmp_path: Path) -> None:
    whole = torch.arange(64 * 1024, dtype=torch.int32).reshape(64, 1024)
    save_file({"a": torch.zeros(3), "w": whole}, tmp_path / "m.safetensors")
    tensor = opened(tmp_path / "m.safetensors")["w"]
    span = tensor.span(10, 20)
    buffer = Buffer(len(span))
    if not span.file.load(span.start, span.stop, buffer):
        pytest.skip("this file system has no direct reads")
    assert torch.equal(tensor.rows(10, 20), whole[10:20])
    assert torch.equal(tensor.rows(12, 13), whole[12:13])
    assert torch.equal(tensor.rows(5, 15), whole[5:15])  # from the map: not all of it is loaded
    inside = tensor.rows(12, 13)
    inside.zero_()
    assert not tensor.rows(12, 13).any(), "a view of the buffer"
    span.file.unload(span.start, span.stop)
    assert torch.equal(tensor.rows(10, 20), whole[10:20])


def test_what_is_forgotten_leaves_the_cache(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "m.safetensors")
    with (tmp_path / "m.safetensors").open("rb") as stream:
        fsync(stream.fileno())  # pages that are not yet on the disk stay
    tensor = opened(tmp_path / "m.safetensors")["w"]
    span = tensor.span(0, 1 << 20)
    span.file.touch(span.start, span.stop)
    assert span.file.cached(span.start, span.stop)
    span.file.forget(span.start, span.stop)
    if span.file.cached(span.start, span.stop):
        pytest.skip("this file system keeps its pages")
    assert bool((tensor() == 1).all())
