"""The same run in one process and in two, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compressor.tiny_project import Project, onnx_project

STATIC = {"pass": "quantize-static", "weights": {"rounding": "nearest"}}


def in_two_processes(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m compressor`` in two processes that share the work."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = str(root)
    return subprocess.run(
        [*launcher, "-m", "compressor", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def both_ways(make: Path, step: dict[str, object]) -> tuple[Project, Project]:
    """Run a pass in one process and in two, each in a folder of its own."""
    alone, shared = onnx_project(make / "alone"), onnx_project(make / "shared")
    for project in (alone, shared):
        project.spec["passes"] = [step]
        project.spec["data"]["calibration"]["batch"] = 10  # five batches for two processes
    alone.run()
    done = in_two_processes(shared.folder, "run", str(shared.path))
    assert done.returncode == 0, done.stderr
    return alone, shared


@pytest.mark.parametrize("observer", ["min-max", "entropy"])
def test_counts_give_the_same_bytes(tmp_path: Path, observer: str):
    alone, shared = both_ways(tmp_path, {**STATIC, "activations": {"observer": observer}})
    assert alone.artifacts()
    assert shared.artifacts() == alone.artifacts()
    assert shared.leftovers() == alone.leftovers()


def test_each_process_sees_its_own_batches(tmp_path: Path):
    """One bad batch is enough, whichever process has it."""
    project = onnx_project(tmp_path)
    project.spec["passes"] = [STATIC]
    project.spec["data"]["calibration"] |= {"batch": 16, "transform": "tiny_marks:spoil"}
    (tmp_path / "tiny_marks.py").write_text(
        "import os, pathlib\n"
        "def spoil(batch):\n"
        "    rank = os.environ.get('RANK', 'alone')\n"
        "    with open(pathlib.Path(__file__).parent / f'seen-{rank}', 'a') as file:\n"
        "        print(float(batch['image'].sum()), file=file)\n"
        "    return batch\n",
        encoding="utf-8",
    )
    done = in_two_processes(tmp_path, "run", str(project.path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]  # printed once, by the first process
    assert (tmp_path / "seen-0").is_file()
    assert (tmp_path / "seen-1").is_file()


def test_a_failure_ends_all_processes(tmp_path: Path):
    project = onnx_project(tmp_path)
    project.spec["passes"] = [{"pass": "quantize-static", "layers": [{"match": "none*"}]}]
    done = in_two_processes(tmp_path, "run", str(project.path))
    assert done.returncode != 0
    assert "none*" in done.stderr
    assert done.stderr.startswith("error: ")  # what the launcher says of it comes after
    assert "internal error" not in done.stderr
    assert not project.output.exists()


def bare_checkpoint(folder: Path) -> Path:
    """Write a sharded checkpoint of linear layers."""
    folder.mkdir()
    torch.manual_seed(3)
    index = {}
    for shard in range(3):
        tensors = {
            f"model.layers.{shard}.mlp.{part}_proj.weight": torch.randn(96, 128).bfloat16()
            for part in ("up", "down")
        }
        name = f"model-{shard + 1:05}-of-00003.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return folder


def test_shards_are_split_and_the_same(tmp_path: Path):
    source = bare_checkpoint(tmp_path / "float")
    command = ["quantize", str(source), "--preset", "int4-g128", "-o"]
    alone = subprocess.run(
        [sys.executable, "-m", "compressor", *command, "one"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    done = in_two_processes(tmp_path, *command, "two")
    assert done.returncode == 0, done.stderr
    files = sorted(p.name for p in (tmp_path / "one").glob("model*"))
    assert len(files) == 4
    for name in files:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
