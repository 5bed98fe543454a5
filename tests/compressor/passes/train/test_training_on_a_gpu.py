"""What only a GPU can show: loss scaling, the same bytes each time, and nccl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from compressor.errors import SpecError
from compressor.passes.train.accelerators import accelerated
from compressor.passes.train.finetune import Finetune
from compressor.types.data import Ranks
from compressor.types.passes import Outcome
from tests.compressor.passes.train.distill_models import Unlabelled, block, distilled, divergence
from tests.compressor.passes.train.small_qat import quantized
from tests.compressor.passes.train.small_training import SmallData, small
from tests.compressor.passes.train.test_finetune import Killed, ending_at, same, state, tuned
from tests.paths import ROOT

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PRECISIONS = ("float32", "bfloat16", "float16")


def losses(outcome: Outcome) -> list[float]:
    """Return the first and the last loss."""
    return [float(part) for part in outcome.notes[0].split()[1:4:2]]


class Pair:
    """Two processes."""

    rank = 0
    size = 2


def test_each_process_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SpecError) as raised, accelerated("float32", cast("Ranks", Pair())):
        pass
    text = "2 processes on this machine: train on GPUs, but it has 1; start 1, or set"
    assert str(raised.value).startswith(text)


def test_float16_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="needs a GPU"):
        tuned(tmp_path, precision="float16")
    with pytest.raises(SpecError, match="needs a GPU"):
        Finetune.model_validate({"precision": "float16", "steps": 1}).plan(small())


@on_a_gpu
@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_trained_in_16_bits(tmp_path: Path, bits: int, precision: str) -> None:
    options = {"weights": {"bits": bits}, "activations": {"bits": bits}, "steps": 30}
    data = SmallData(40, noisy=False)
    first, last = losses(quantized(tmp_path, data=data, precision=precision, **options))
    assert last < first


@on_a_gpu
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_a_student_learns_in_16_bits(tmp_path: Path, precision: str) -> None:
    before = divergence(block(4), block())
    own = {"alpha": 0.0, "data": Unlabelled(noisy=False), "steps": 150, "precision": precision}
    outcome = distilled(tmp_path, block(4), block(), **own)
    assert divergence(outcome.carrier, block()) < 0.4 * before


@on_a_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_falls(tmp_path: Path, precision: str) -> None:
    outcome = tuned(
        tmp_path, precision=precision, steps=30, data=SmallData(40, noisy=False), clip=1.0
    )
    first, last = losses(outcome)
    assert last < 0.8 * first
    assert all(t.dtype in (torch.float32, torch.int64) for t in state(outcome).values())


@on_a_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_interrupted_training_ends_in_the_same_bytes(tmp_path: Path, precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "save_every": 3, "validation": 0.2}
    whole = tuned(tmp_path / "whole", **options)
    folder = tmp_path / "broken"
    with pytest.raises(Killed):
        tuned(folder, **options, stage=ending_at(8, "killed"))
    (saved,) = (folder / "state").glob("state-*/progress.json")
    scaler = json.loads(saved.read_text())["scaler"]
    assert (scaler is not None) == (precision == "float16")
    assert same(state(tuned(folder, **options)), state(whole))


@on_a_gpu
def test_a_gpu_trains_as_a_processor_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"data": SmallData(30, noisy=False), "optimizer": "sgd"}
    there = tuned(tmp_path / "gpu", small(dropout=0.0), **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = tuned(tmp_path / "cpu", small(dropout=0.0), **options)
    for name, value in state(here).items():
        torch.testing.assert_close(state(there)[name], value, rtol=2e-3, atol=2e-3)


@on_a_gpu
@pytest.mark.parametrize("spread", [False, True], ids=["nccl", "fsdp"])
def test_torchrun_with_nccl(tmp_path: Path, spread: bool) -> None:
    """One process, since nccl takes a GPU for each."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "from tests.compressor.passes.train.test_finetune import state, tuned\n"
        "dist.init_process_group('cpu:gloo,cuda:nccl')\n"
        "outcome = tuned(Path(sys.argv[1]), steps=30)\n"
        "print(outcome.notes[0])\n"
        "dist.destroy_process_group()\n"
    )
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if spread else {}
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    alone = ["--standalone", "--nproc-per-node", "1"]  # a port of its own, beside other tests
    done = subprocess.run(
        [*torchrun, *alone, str(program), str(tmp_path / "work")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **fsdp},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = (float(part) for part in done.stdout.split()[1:4:2])
    assert last < 0.7 * first
