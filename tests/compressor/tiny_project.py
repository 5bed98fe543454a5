"""A small project in a folder of its own: a network, its weights, data and a spec."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper

from compressor import catalog
from compressor.files import file_sha256
from compressor.report.run import RunResult, run_spec
from compressor.run.options import RunOptions
from compressor.run.plan import Plan, make_plan
from compressor.run.store import store_of
from compressor.spec.load import load_spec
from compressor.spec.user_code import importable
from compressor.types.proofs import sealed_text

CLASSES, WIDTH, SIDE, SAMPLES = 4, 8, 8, 48
ONNX, MODULE, CHECKPOINT = "tiny.onnx", "tiny_net", "tiny.pt"
REPORTS = ("report.json", "report.md", "report.html")

NETWORK = """
import torch
from torch import nn


class TinyNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.fc = nn.Linear(width, 4)

    def forward(self, image):
        x = torch.relu(self.bn1(self.conv1(image)))
        x = torch.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


def build(width=8):
    return TinyNet(width)
"""

TRANSFORMS = """
def halve(batch):
    return {**batch, "image": batch["image"] / 2}
"""


class Project:
    """A spec and the files that it names.

    Attributes:
        folder: where all of it lies.
        spec: the spec as a dictionary; change it before a run.
    """

    def __init__(self, folder: Path, model: Mapping[str, Any]):
        self.folder = folder
        self.spec: dict[str, Any] = {
            "version": 1,
            "name": "tiny",
            "model": dict(model),
            "data": {
                "calibration": {"npz": "calib.npz", "inputs": {"image": "image"}, "batch": 16},
                "evaluation": {
                    "npz": "test.npz",
                    "inputs": {"image": "image"},
                    "target": "label",
                    "batch": 16,
                },
            },
            "passes": [],
            "exports": [{"format": "onnx"}],
            "limits": {"size-ratio": None, "latency-ratio": None},
        }

    @property
    def path(self) -> Path:
        """The spec's file, written afresh."""
        path = self.folder / "spec.yaml"
        path.write_text(json.dumps(self.spec, indent=1), encoding="utf-8")
        return path

    @property
    def output(self) -> Path:
        return self.folder / "out" / "tiny"

    @property
    def store(self) -> Path:
        return store_of(self.output)

    def run(
        self, *settings: str, fresh: bool = False, force: bool = False, strict: bool = False
    ) -> RunResult:
        forget_modules()
        options = RunOptions(fresh=fresh, force=force, strict=strict)
        with importable([self.folder]):
            return run_spec(load_spec(self.path, settings), options)

    def plan(self, *settings: str) -> Plan:
        forget_modules()
        with importable([self.folder]):
            return make_plan(load_spec(self.path, settings))

    def report(self) -> Any:
        return json.loads((self.output / "report.json").read_text(encoding="utf-8"))

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Replace the report, as if the run had written this one."""
        path, manifest = self.output / "report.json", self.output / "manifest.json"
        path.write_text(json.dumps(report), encoding="utf-8")
        content = json.loads(manifest.read_text(encoding="utf-8"))
        (entry,) = (entry for entry in content["outputs"] if entry["name"] == path.name)
        entry["sha256"] = file_sha256(path)
        del content["seal"]
        manifest.write_text(sealed_text(content), encoding="utf-8")

    def artifacts(self) -> dict[str, bytes]:
        """Return name → bytes of the exported files."""
        return {p.name: p.read_bytes() for p in sorted(self.output.glob("model.*"))}

    def leftovers(self) -> list[str]:
        """Return the names of staging folders and of files that a run did not finish."""
        known = {"manifest.json", "samples.npz", *REPORTS}
        here = [p.name for p in self.output.glob("*") if p.name not in known]
        folders = (self.output, self.store)
        staged = [p.name for folder in folders for p in folder.rglob(".staging-*")]
        return sorted(staged + [n for n in here if not n.startswith(".staging-")])


def copied(project: Project, folder: Path) -> Project:
    """Return a project as another was left, in a new folder; results hold wherever they lie."""
    copy = Project(shutil.copytree(project.folder, folder), {})
    copy.spec = deepcopy(project.spec)
    return copy


def setting(path: str, value: Any) -> Callable[[Project], None]:
    """Return a function that sets one key of a project's spec; dots lead inside."""

    def change(project: Project) -> None:
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        entry: Any = project.spec
        for part in parents:
            entry = entry[part]
        entry[last] = value

    return change


def onnx_project(folder: Path) -> Project:
    """Write a project around an ONNX file: two convolutions and a linear layer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_onnx()
    onnx.save(model, folder / ONNX)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    images = sample_images(1)
    write_data(folder, images, session.run(None, {"image": images})[0].argmax(1))
    return Project(folder, {"onnx": ONNX})


def torch_project(folder: Path, suffix: Literal[".pt", ".safetensors"] = ".pt") -> Project:
    """Write a project around a module and its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{MODULE}.py").write_text(NETWORK, encoding="utf-8")
    (folder / "tiny_data.py").write_text(TRANSFORMS, encoding="utf-8")
    module = tiny_module()
    checkpoint = folder / Path(CHECKPOINT).with_suffix(suffix)
    if suffix == ".pt":
        torch.save(module.state_dict(), checkpoint)
    else:
        from safetensors.torch import save_file

        save_file(module.state_dict(), checkpoint)
    images = sample_images(1)
    with torch.inference_mode():
        labels = module(torch.from_numpy(images)).argmax(1).numpy()
    write_data(folder, images, labels)
    return Project(
        folder,
        {
            "factory": f"{MODULE}:build",
            "checkpoint": checkpoint.name,
            "inputs": {"image": {"shape": ["batch", 1, SIDE, SIDE]}},
        },
    )


def tiny_module() -> torch.nn.Module:
    """Build the network of ``NETWORK`` with weights that are always the same."""
    scope: dict[str, Any] = {}
    exec(NETWORK, scope)
    torch.manual_seed(5)
    module: torch.nn.Module = scope["build"]()
    return module.eval()


def write_data(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write calibration and evaluation data."""
    np.savez(folder / "calib.npz", image=sample_images(2))
    np.savez(folder / "test.npz", image=images, label=labels.astype(np.int64))


def sample_images(seed: int, count: int = SAMPLES) -> np.ndarray:
    """Return random images ``[count, 1, 8, 8]``."""
    noise = np.random.default_rng(seed).standard_normal((count, 1, SIDE, SIDE))
    return noise.astype(np.float32)


def tiny_onnx(seed: int = 0, batch: int | str = "batch") -> onnx.ModelProto:
    """Make an ONNX network of the same kind as ``NETWORK``, without batch-norm."""
    rng = np.random.default_rng(seed)
    shapes = {
        "conv1.weight": (WIDTH, 1, 3, 3),
        "conv1.bias": (WIDTH,),
        "conv2.weight": (WIDTH, WIDTH, 3, 3),
        "conv2.bias": (WIDTH,),
        "fc.weight": (CLASSES, WIDTH),
        "fc.bias": (CLASSES,),
    }
    weights = {n: rng.standard_normal(s).astype(np.float32) / 3 for n, s in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["image", "conv1.weight", "conv1.bias"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "conv2.weight", "conv2.bias"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["logits"], transB=1),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", kind, [batch, 1, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", kind, [batch, CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def forget_modules() -> None:
    """Let Python import the project's modules from the disk again."""
    for name in (MODULE, "tiny_data", "tiny_metric", "tiny_blocks"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def forget_catalog() -> None:
    """Let the catalog look again for what there is."""
    for memory in (catalog.names, catalog.load, catalog.third_party):
        memory.cache_clear()
