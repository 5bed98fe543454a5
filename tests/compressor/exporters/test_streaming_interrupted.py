"""Streamed checkpoints: kills, full disks and damaged input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ArtifactError, InputError, ModelError
from compressor.exporters.safetensors.stream_plan import finish, journal_of, plan_stream
from compressor.exporters.safetensors.streaming import ShardFile, write_shards
from compressor.models.checkpoint.carrier import open_checkpoint
from tests.compressor.exporters.streamed import (
    CHANNEL,
    quantized,
    threads,
    written,
)
from tests.compressor.models.checkpoint.llama_files import (
    llama_tensors,
    write_folder,
)


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
from compressor.exporters.safetensors.streaming import ShardFile
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.exporters.safetensors.stream_plan import plan_stream
from compressor.exporters.safetensors.streaming import write_shards
from tests.compressor.exporters.streamed import quantized
source, target = map(Path, sys.argv[1:])
carrier = quantized(open_checkpoint(source))
put = ShardFile.put
def slow(self, name, tensor, start=0):
    time.sleep(0.02)
    put(self, name, tensor, start)
ShardFile.put = slow
write_shards(plan_stream(carrier), target, threads=2)
"""


@pytest.mark.parametrize(
    "kind", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
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
    with pytest.raises(InputError, match=r"has 100 bytes free, but [\d,]+ will be written"):
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
