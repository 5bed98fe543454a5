"""Checkpoints streamed into the layout of compressed-tensors: bytes, memory, kills and damage."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.carriers.checkpoint.headers import read_header
from compressor.carriers.checkpoint_carrier import CheckpointCarrier, open_checkpoint
from compressor.errors import ArtifactError, InputError, ModelError, SpecError
from compressor.types.exporter import ExportContext
from compressor.types.quantized import QuantizedTensor, Scheme, WeightCodes
from compressor.types.stored import StoredTensor
from exporters.safetensors import blocks
from exporters.safetensors.compressed_tensors import stored_tensors
from exporters.safetensors.exporter import SafetensorsExporter
from exporters.safetensors.finishing import check_written, finish
from exporters.safetensors.shard_file import ShardFile, journal_of
from exporters.safetensors.stream_plan import StreamPlan, plan_stream
from exporters.safetensors.streaming import write_shards
from tests.compressor.carriers.checkpoint.llama_files import (
    COMPANIONS,
    CONFIG,
    INDEX,
    llama_tensors,
    write_folder,
)

CONTEXT = ExportContext("streamed", "spec")
SYMMETRIC = Scheme(4, granularity="group", group=32, scale_type="bfloat16", narrow=False)
ASYMMETRIC = Scheme(
    4, symmetric=False, signed=False, granularity="group", group=32, scale_type="bfloat16"
)
CHANNEL = Scheme(8, scale_type="bfloat16", narrow=False)


class Rank:
    """One of several processes that wait for nobody."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def wait(self) -> None:
        """Go on."""

    def gathered(self, value: Any) -> list[Any]:
        """Return the own value only."""
        return [value]


def rounded(matrix: torch.Tensor, scheme: Scheme) -> QuantizedTensor:
    """Quantize row by row, simply."""
    rows, columns = matrix.shape
    values = matrix.float().reshape(rows, scheme.groups(columns), -1)
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    if scheme.symmetric:
        scale = torch.maximum(-low, high) / scheme.high
        zero = torch.zeros_like(scale)
    else:
        scale = (high - low) / (scheme.high - scheme.low)
        zero = torch.round(-low / scale.clamp(min=1e-9))
    scale = torch.where(scale > 0, scale, 1.0).to(torch.bfloat16).float()
    codes = torch.round(values / scale[:, :, None]) + zero[:, :, None]
    dtype = torch.int8 if scheme.signed else torch.uint8
    codes = codes.clamp(scheme.low, scheme.high).to(dtype).reshape(rows, columns)
    return QuantizedTensor(codes, scale, zero.to(dtype), scheme)


def quantized(
    carrier: CheckpointCarrier, scheme: Scheme = SYMMETRIC, *, by_rows: bool = True
) -> CheckpointCarrier:
    layers = [layer for layer in carrier.layers() if "layers" in layer.name]
    compute = partial(rounded, scheme=scheme)
    return carrier.with_codes(
        {layer.weight: WeightCodes(layer, scheme, compute, by_rows) for layer in layers}
    )


def written(carrier: CheckpointCarrier, target: Path, **options: Any) -> dict[str, bytes]:
    """Export, and return the files' bytes by name."""
    target.mkdir()
    exporter = SafetensorsExporter(**options)
    exporter.check(carrier)
    paths = exporter.write(carrier, target, CONTEXT)
    found = {path.name: path.read_bytes() for path in target.iterdir()}
    assert sorted(found) == sorted(path.name for path in paths)
    assert sum(map(len, found.values())) == exporter.predict(carrier)
    exporter.check_written(carrier, paths[0])
    return found


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()
    }


def expected_tensors(carrier: CheckpointCarrier) -> dict[str, torch.Tensor]:
    """What should be in the file, each tensor computed whole."""
    expected = {}
    for name, tensor in carrier.tensors().items():
        if tensor.codes is None:
            expected[name] = tensor.read().clone()
        else:
            expected.update(stored_tensors(tensor, tensor.codes.compute(tensor.read())))
    return expected


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def threads() -> set[str]:
    return {
        t.name for t in threading.enumerate() if t.name.startswith(("stream", "finish", "read"))
    }


# --------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("scheme", [SYMMETRIC, ASYMMETRIC, CHANNEL])
@pytest.mark.parametrize("by_rows", [True, False])
def test_tensors_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Scheme, by_rows: bool
) -> None:
    monkeypatch.setattr("exporters.safetensors.streaming._AT_ONCE", 700)  # some 11 rows of 64
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
        patch.setattr("exporters.safetensors.streaming._AT_ONCE", at_once)
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
    assert seen[-1] == plan.input_bytes == sum(t.nbytes for t in llama_tensors().values())
    again: list[int] = []
    write_shards(plan, tmp_path / "out", advance=again.append)
    assert again == [plan.input_bytes]


# --------------------------------------------------------------------------- several processes


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


# --------------------------------------------------------------------------- kills and failures


class Stopped(Exception):
    """Stands for whatever ends a process."""


def stop_after(monkeypatch: pytest.MonkeyPatch, puts: int, error: type[BaseException]) -> None:
    """Let the so-many-th write fail."""
    count = iter(range(1_000_000))
    put = ShardFile.put

    def failing(self: ShardFile, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        if next(count) >= puts:
            raise error("stopped")
        put(self, name, tensor, start)

    monkeypatch.setattr(ShardFile, "put", failing)


@pytest.mark.parametrize("puts", [0, 1, 10, 25, 40])
@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
def test_what_was_finished_stays_and_nothing_else(
    tmp_path: Path, puts: int, error: type[BaseException]
) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m", shards=4)))
    whole = written(carrier, tmp_path / "whole")
    plan = plan_stream(carrier)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, puts, error)
        with pytest.raises(error):
            write_shards(plan, out, threads=2)
    assert not threads()
    left = {p.name: p.read_bytes() for p in out.iterdir()}
    shards = {n for n in left if not n.startswith(".")}
    assert left.keys() == shards | {journal_of(out / n).name for n in shards}
    assert all(left[n] == whole[n] for n in shards)
    stamps = {n: (out / n).stat().st_mtime_ns for n in shards}
    write_shards(plan, out)
    assert {n: (out / n).stat().st_mtime_ns for n in shards} == stamps
    finish(plan, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole


def test_another_plan_or_a_damaged_shard_is_written_again(tmp_path: Path) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")))
    plan = plan_stream(carrier)
    (tmp_path / "out").mkdir()
    write_shards(plan, tmp_path / "out")
    path = tmp_path / "out" / plan.shards[0].name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    other = tmp_path / "out" / plan.shards[1].name
    stamp = other.stat().st_mtime_ns
    write_shards(plan, tmp_path / "out")
    assert path.read_bytes() == content
    assert other.stat().st_mtime_ns == stamp
    for changed in (plan_stream(carrier, "other key"), plan_stream(quantized(carrier, CHANNEL))):
        assert changed.digest != plan.digest
        with pytest.raises(ArtifactError, match="written for another plan"):
            finish(changed, tmp_path / "out")


CHILD = """
import sys, time
from pathlib import Path
from exporters.safetensors.shard_file import ShardFile
from tests.exporters import test_streaming_export as t
source, target = map(Path, sys.argv[1:])
carrier = t.quantized(t.open_checkpoint(source))
put = ShardFile.put
def slow(self, name, tensor, start=0):
    time.sleep(0.02)
    put(self, name, tensor, start)
ShardFile.put = slow
t.write_shards(t.plan_stream(carrier), target, threads=2)
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_is_resumed_to_the_same_bytes(tmp_path: Path, kind: int) -> None:
    folder = write_folder(tmp_path / "m", shards=4)
    carrier = quantized(open_checkpoint(folder))
    whole = written(carrier, tmp_path / "whole")
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", CHILD, str(folder), str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list(out.glob("*.safetensors"))) < 2:
            time.sleep(0.005)
        os.kill(process.pid, kind)
        process.wait(60)
    done = sorted(p.name for p in out.glob("*.safetensors"))
    assert 2 <= len(done) < 4
    assert all((out / name).read_bytes() == whole[name] for name in done)
    parts = [p for p in out.iterdir() if p.name.endswith(".part")]
    assert bool(parts) is (kind == signal.SIGKILL)
    plan = plan_stream(carrier)
    write_shards(plan, out)
    finish(plan, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole


def test_a_full_disk_is_noticed_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_stream(quantized(open_checkpoint(write_folder(tmp_path / "m"))))
    (tmp_path / "out").mkdir()
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"has room for 100 bytes, [\d,]+ will be written"):
        write_shards(plan, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_stream(quantized(open_checkpoint(write_folder(tmp_path / "m"))))
    (tmp_path / "out").mkdir()

    def full(handle: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(InputError, match="is full"):
        write_shards(plan, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    assert not threads()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    tensors = llama_tensors()
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][63, 5] = value
    plan = plan_stream(quantized(open_checkpoint(write_folder(tmp_path / "m", tensors))))
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=f"'{name}': holds 1 values that are NaN or infinite"):
        write_shards(plan, tmp_path / "out")
    assert not threads()


def test_large_values_are_finite(tmp_path: Path) -> None:
    weight = torch.full((64, 64), 3e38)
    save_file({"layers.a.weight": weight}, tmp_path / "model.safetensors")
    written(quantized(open_checkpoint(tmp_path)), tmp_path / "out")


def test_an_input_that_changes_meanwhile(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    plan = plan_stream(quantized(open_checkpoint(folder)))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="has changed since its header was read"):
        write_shards(plan, tmp_path / "out")
    left = {p.name for p in (tmp_path / "out").iterdir()}
    assert not {n for n in left if n.endswith(".part") or n == shard.name}


# --------------------------------------------------------------------------- plans and checks


def test_what_the_layout_cannot_hold_is_said_at_plan_time(tmp_path: Path) -> None:
    save_file({"layers.h.c_attn.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    carrier = quantized(open_checkpoint(tmp_path))
    with pytest.raises(SpecError, match=r"layer 'layers\.h\.c_attn'"):
        SafetensorsExporter().check(carrier)


def test_auto_streams_what_has_no_graph(tmp_path: Path) -> None:
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    SafetensorsExporter().check(carrier)
    with pytest.raises(SpecError, match=r"needs a graph.*or layout: compressed-tensors"):
        SafetensorsExporter(layout="graph").check(carrier)


def damaged(out: Path, plan: StreamPlan, place: str) -> None:
    shard = plan.shards[0]
    path = out / shard.name
    content = bytearray(path.read_bytes())
    if place == "codes":
        name = next(n for n in shard.layout.offsets if n.endswith("weight_packed"))
        content[shard.layout.offsets[name]] ^= 1
    elif place == "kept":
        name = next(n for n in shard.layout.offsets if n.endswith("norm.weight"))
        content[shard.layout.offsets[name]] ^= 1
    elif place == "header":
        content[content.index(b"BF16")] ^= 1
    elif place == "cut":
        del content[-1:]
    path.write_bytes(content)
    if place == "gone":
        path.unlink()
    if place in ("config.json", "tokenizer.json"):
        (out / place).write_text("{}")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("codes", "is not what its input gives"),
        ("kept", "is not what its input gives"),
        ("header", "has the unknown dtype"),
        ("cut", "cannot be read"),
        ("gone", "cannot be read"),
        ("config.json", "is not what was planned"),
        ("tokenizer.json", "is not the input's"),
    ],
)
def test_damage_is_found(tmp_path: Path, place: str, message: str) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")))
    written(carrier, tmp_path / "out")
    plan = plan_stream(carrier)
    assert "2 headers" in check_written(plan, tmp_path / "out")
    damaged(tmp_path / "out", plan, place)
    with pytest.raises(ArtifactError, match=message):
        check_written(plan, tmp_path / "out")


def test_another_models_shard_is_found(tmp_path: Path) -> None:
    carrier = quantized(open_checkpoint(write_folder(tmp_path / "m")))
    written(carrier, tmp_path / "out")
    with pytest.raises(ArtifactError, match="describes other tensors than were planned"):
        check_written(plan_stream(quantized(carrier, CHANNEL)), tmp_path / "out")


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    plan = plan_stream(quantized(open_checkpoint(write_folder(tmp_path / "m"))))
    (tmp_path / "out").mkdir()
    write_shards(plan, tmp_path / "out")
    for file in finish(plan, tmp_path / "out"):
        content = file.path.read_bytes()
        assert (file.nbytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_tensors_in_memory_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 8)
    tensor = StoredTensor("w", (40, 8), torch.float32, lambda: weight)
    assert blocks.pieces(tensor, 16) == [(0, 40)]
    parts = list(blocks.block_tensors(tensor, 0, 40, 16))
    assert [start for _, _, start in parts] == list(range(0, 40 * 32, 64))
    assert torch.equal(torch.cat([rows for _, rows, _ in parts]), weight)


# --------------------------------------------------------------------------- memory


MEMORY = """
import sys, threading, time
from pathlib import Path
from compressor.inspection.open_path import inspect_path
from exporters.safetensors import streaming
from tests.exporters import test_streaming_export as t
streaming._AT_ONCE = 1 << 18
source, target = map(Path, sys.argv[1:])
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon"))
from compressor.inspection import checkpoint, compressed, onnx_file, run_output  # memory, too
carrier = t.quantized(t.open_checkpoint(source))
plan = t.plan_stream(carrier)
start, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
t.write_shards(plan, target, threads=2)
t.finish(plan, target)
t.check_written(plan, target)
inspect_path(source)
done.set()
thread.join()
print(peak[0] - start, plan.input_bytes)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    source, out = tmp_path / "m", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for shard in range(2):
        pool = torch.randn(1 << 20).to(torch.bfloat16).repeat(32)
        tensors = {f"layers.{shard}.{i}.weight": pool.view(-1, 4096).clone() for i in range(2)}
        save_file(tensors, source / f"{shard}.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(source), str(out)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size == 4 * 2**26
    assert grown < size // 2, grown  # a whole tensor as float32 would be that much
