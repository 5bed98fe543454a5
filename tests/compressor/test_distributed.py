"""The same run in one process and in two, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file

from tests.compressor.tiny_project import Project, onnx_project

WIDTH = 64
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


def perceptron(folder: Path) -> Project:
    """Write a project around a residual block and a layer, with correlated inputs."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    names = ("one.weight", "two.weight", "three.weight")
    shapes = ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH))
    arrays = {
        name: (random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        for name, shape in zip(names, shapes, strict=True)
    }
    nodes = [
        helper.make_node("MatMul", ["x", names[0]], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", names[1]], ["c"]),
        helper.make_node("Add", ["c", "x"], ["d"]),
        helper.make_node("MatMul", ["d", names[2]], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", WIDTH]) for n in ("x", "y")
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "perceptron", ends[:1], ends[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "net.onnx")
    mixed = random.standard_normal((400, 8)) @ random.standard_normal((8, WIDTH))
    inputs = (mixed + random.standard_normal(mixed.shape) / 2).astype(np.float32)
    np.savez(folder / "data.npz", x=inputs)
    project = Project(folder, {"onnx": "net.onnx"})
    project.spec["data"] = {"calibration": {"npz": "data.npz", "inputs": {"x": "x"}, "batch": 7}}
    project.spec["exports"] = [{"format": "onnx"}]
    return project


def codes_of(project: Project) -> np.ndarray:
    model = onnx.load(project.output / "model.onnx")
    packed = [numpy_helper.to_array(x) for x in model.graph.initializer if x.data_type == x.UINT8]
    assert packed
    flat = np.concatenate([array.reshape(-1) for array in packed])
    return np.stack([flat & 15, flat >> 4])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_codes_that_rest_on_sums_are_nearly_all_the_same(tmp_path: Path, method: str):
    alone, shared = perceptron(tmp_path / "alone"), perceptron(tmp_path / "shared")
    nearest = perceptron(tmp_path / "nearest")
    for project in (alone, shared, nearest):
        step = {"pass": "quantize-weights", "bits": 4, "group": 32, "method": method}
        project.spec["passes"] = [step]
    nearest.spec["passes"][0]["method"] = "rtn"
    alone.run()
    nearest.run()
    done = in_two_processes(shared.folder, "run", str(shared.path))
    assert done.returncode == 0, done.stderr
    ours, theirs = codes_of(shared), codes_of(alone)
    assert ours.size == 4 * WIDTH * WIDTH + WIDTH * WIDTH
    assert (ours == theirs).mean() >= 0.999
    assert (theirs == codes_of(nearest)).mean() < 0.95


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
