"""Streamed checkpoints: what is checked before and after writing, and memory."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ArtifactError, SpecError
from compressor.exporters.safetensors import streaming
from compressor.exporters.safetensors.exporter import SafetensorsExporter, check_written
from compressor.exporters.safetensors.stream_plan import StreamPlan, finish, plan_stream
from compressor.exporters.safetensors.streaming import write_shards
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.types.layers import StoredTensor
from tests.compressor.exporters.streamed import (
    CHANNEL,
    quantized,
    written,
)
from tests.compressor.models.checkpoint.llama_files import (
    write_folder,
)


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
        ("codes", "differs from its input"),
        ("kept", "differs from its input"),
        ("header", "has the unknown dtype"),
        ("cut", "cannot be read"),
        ("gone", "cannot be read"),
        ("config.json", "differs from what was planned"),
        ("tokenizer.json", "differs from the input's"),
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
    with pytest.raises(ArtifactError, match="describes other tensors than planned"):
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
    assert streaming.pieces(tensor, 16) == [(0, 40)]
    parts = list(streaming.block_tensors(tensor, 0, 40, 16))
    assert [start for _, _, start in parts] == list(range(0, 40 * 32, 64))
    assert torch.equal(torch.cat([rows for _, rows, _ in parts]), weight)


MEMORY = """
import sys, threading, time
from pathlib import Path
from compressor.lab.inspect.path import inspect_path
from compressor.exporters.safetensors import streaming
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.exporters.safetensors.exporter import check_written, finish
from compressor.exporters.safetensors.stream_plan import plan_stream
from tests.compressor.exporters.streamed import quantized
streaming._AT_ONCE = 1 << 18
source, target = map(Path, sys.argv[1:])
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon"))
from compressor.lab.inspect import checkpoint, graph, path  # they take memory, too
carrier = quantized(open_checkpoint(source))
plan = plan_stream(carrier)
start, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
streaming.write_shards(plan, target, threads=2)
finish(plan, target)
check_written(plan, target)
inspect_path(source)
done.set()
thread.join()
print(peak[0] - start, sum(s.read_bytes for s in plan.shards))
"""


@pytest.mark.slow
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
