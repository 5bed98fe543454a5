"""Checkpoints streamed into the layout of compressed-tensors: the bytes, and who writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.errors import ArtifactError
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.exporters.safetensors.stream_plan import finish, plan_stream
from compressor.exporters.safetensors.streaming import write_shards
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.codec.headers import read_header
from compressor.types.exporter import ExportContext
from compressor.types.layers import Scheme
from tests.compressor.exporters.streamed import (
    ASYMMETRIC,
    CHANNEL,
    CONTEXT,
    SYMMETRIC,
    Rank,
    assert_equal,
    expected_tensors,
    quantized,
    rounded,
    tensors_of,
    threads,
    written,
)
from tests.compressor.models.checkpoint.llama_files import (
    COMPANIONS,
    CONFIG,
    INDEX,
    llama_tensors,
    write_folder,
)


@pytest.mark.parametrize("scheme", [SYMMETRIC, ASYMMETRIC, CHANNEL])
@pytest.mark.parametrize("by_rows", [True, False])
def test_tensors_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Scheme, by_rows: bool
) -> None:
    monkeypatch.setattr(
        "compressor.exporters.safetensors.streaming._AT_ONCE", 700
    )  # some 11 rows of 64
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")), scheme, by_rows=by_rows)
    written(carrier, tmp_path / "out")
    assert_equal(tensors_of(tmp_path / "out"), expected_tensors(carrier))


def test_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    found = written(quantized(open_checkpoint(folder)), tmp_path / "out")
    shards = sorted(n for n in before if n.endswith(".safetensors"))
    assert sorted(found) == sorted([*shards, INDEX, "config.json", *COMPANIONS])
    assert all(found[name].decode() == text for name, text in COMPANIONS.items())
    config = json.loads(found["config.json"])
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == CONFIG
    index = json.loads(found[INDEX])
    places = {
        name: shard for shard in shards for name in read_header(tmp_path / "out" / shard).tensors
    }
    assert index["weight_map"] == places
    total = sum(t.nbytes for t in tensors_of(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert not threads()


def test_the_main_file_comes_first(tmp_path: Path) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")))
    for name, limit in ((INDEX, None), ("model.safetensors", 1 << 30)):
        (tmp_path / name).mkdir()
        exporter = SafetensorsExporter(max_shard_size=limit)
        assert exporter.write(carrier, tmp_path / name, CONTEXT)[0].name == name


def test_a_file_alone(tmp_path: Path) -> None:
    save_file({"layers.a.weight": torch.randn(32, 64)}, tmp_path / "odd name.safetensors")
    carrier = quantized(open_checkpoint(tmp_path / "odd name.safetensors"))
    found = written(carrier, tmp_path / "out")
    assert sorted(found) == ["config.json", "model.safetensors"]
    assert list(json.loads(found["config.json"])) == ["quantization_config"]


def test_without_codes_it_is_a_copy(tmp_path: Path) -> None:
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    found = written(carrier, tmp_path / "out")
    assert_equal(tensors_of(tmp_path / "out"), llama_tensors())
    assert json.loads(found["config.json"]) == CONFIG


def test_every_dtype_passes_through(tmp_path: Path) -> None:
    tensors = {
        "i64": torch.arange(5),
        "i32": torch.arange(5, dtype=torch.int32),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "f64": torch.randn(3, 3, dtype=torch.float64),
        "f16": torch.randn(3, 3).half(),
        "f8": torch.randn(3).to(torch.float8_e5m2),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    written(open_checkpoint(tmp_path / "model.safetensors"), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bytes(found[name].reshape(-1).view(torch.uint8)) == bytes(
            tensor.reshape(-1).view(torch.uint8)
        )


def test_float8_comes_out_as_floats_and_codes(tmp_path: Path) -> None:
    codes = torch.randn(64, 64).to(torch.float8_e4m3fn)
    scale = torch.rand(64, 1) + 0.5
    tensors = {}
    for name in ("layers.0.fc", "kept"):
        tensors |= {f"{name}.weight": codes.clone(), f"{name}.weight_scale": scale.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"torch_dtype": "float32", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = written(quantized(open_checkpoint(tmp_path)), tmp_path / "out")
    values = codes.float() * scale
    out = tensors_of(tmp_path / "out")
    assert torch.equal(out["kept.weight"], values)
    whole = rounded(values, SYMMETRIC)
    assert torch.equal(out["layers.0.fc.weight_scale"].float(), whole.scale)
    assert "kept.weight_scale" not in out
    method = json.loads(found["config.json"])["quantization_config"]["quant_method"]
    assert method == "compressed-tensors"


def test_weights_that_a_pass_replaced(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    carrier = open_checkpoint(write_folder(tmp_path / "m")).with_weights({name: torch.ones(96, 64)})
    written(quantized(carrier), tmp_path / "out")
    out = tensors_of(tmp_path / "out")
    assert torch.equal(out[f"{name[:-7]}.weight_scale"].float(), torch.full((96, 2), 0.142578125))


@pytest.mark.parametrize("limit", [1, 5_000, 20_000, 1 << 30])
def test_shards_of_another_size(tmp_path: Path, limit: int) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")))
    found = written(carrier, tmp_path / "out", max_shard_size=limit)
    shards = [n for n in found if n.endswith(".safetensors")]
    assert_equal(tensors_of(tmp_path / "out"), expected_tensors(carrier))
    for name in shards:
        held = read_header(tmp_path / "out" / name).tensors
        layers = {n.rpartition(".")[0] for n in held}
        assert len(layers) == 1 or sum(t.nbytes for t in held.values()) <= limit
    assert (INDEX in found) is (len(shards) > 1)
    assert len(shards) == 1 if limit == 1 << 30 else len(shards) > 1


@settings(deadline=None, max_examples=20)
@given(
    at_once=st.integers(1, 5000),
    count=st.integers(1, 4),
    rows=st.integers(1, 70),
    scheme=st.sampled_from([SYMMETRIC, ASYMMETRIC, CHANNEL]),
)
def test_neither_blocks_nor_threads_change_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, at_once: int, count: int, rows: int, scheme: Scheme
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    save_file({"layers.a.weight": weight, "b": weight[0].clone()}, folder / "model.safetensors")
    carrier = quantized(open_checkpoint(folder), scheme)
    plan = plan_stream(carrier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor.exporters.safetensors.streaming._AT_ONCE", at_once)
        (folder / "out").mkdir()
        write_shards(plan, folder / "out", threads=count)
    assert_equal(load_file(folder / "out" / "model.safetensors"), expected_tensors(carrier))


def test_torch_keeps_its_number_of_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        written(quantized(open_checkpoint(write_folder(tmp_path / "m"))), tmp_path / "out")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_progress_counts_input_bytes(tmp_path: Path) -> None:
    plan = plan_stream(quantized(open_checkpoint(write_folder(tmp_path / "m"))))
    (tmp_path / "out").mkdir()
    seen: list[int] = []
    write_shards(plan, tmp_path / "out", advance=seen.append)
    assert seen == sorted(seen)
    size = sum(t.nbytes for t in llama_tensors().values())
    assert seen[-1] == sum(s.read_bytes for s in plan.shards) == size
    again: list[int] = []
    write_shards(plan, tmp_path / "out", advance=again.append)
    assert again == [size]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_share_the_shards(tmp_path: Path, size: int) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m", shards=5)))
    alone = written(carrier, tmp_path / "alone")
    plan = plan_stream(carrier)
    shares = [plan.share(Rank(rank, size)) for rank in range(size)]
    assert sorted(s.name for own in shares for s in own) == sorted(s.name for s in plan.shards)
    loads = [sum(s.read_bytes for s in own) for own in shares]
    assert max(loads) - min(loads) <= max(s.read_bytes for s in plan.shards)
    together = tmp_path / "together"
    together.mkdir()
    for rank in reversed(range(size)):
        write_shards(plan, together, Rank(rank, size))
    finish(plan, together)
    assert {p.name: p.read_bytes() for p in together.iterdir()} == alone


def test_only_the_first_rank_returns_files(tmp_path: Path) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")))
    exporter = SafetensorsExporter()
    contexts = [ExportContext("streamed", "spec", Rank(rank, 2)) for rank in (1, 0)]
    found = [exporter.write(carrier, tmp_path, context) for context in contexts]
    assert found[0] == ()
    exporter.check_written(carrier, found[1][0])


def test_a_missing_share_is_noticed(tmp_path: Path) -> None:
    plan = plan_stream(quantized(open_checkpoint(write_folder(tmp_path / "m"))))
    (tmp_path / "out").mkdir()
    write_shards(plan, tmp_path / "out", Rank(0, 2))
    with pytest.raises(
        ArtifactError, match=r"shard 'model-.*' is missing|is missing or was written"
    ):
        finish(plan, tmp_path / "out")
