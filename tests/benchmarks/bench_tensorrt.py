"""TensorRT engines of real networks: sizes, time to build, types of layers, equal bytes.

Built with TensorRT-RTX, which needs no GPU. Nothing is run, so nothing is said about speed.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from compressor.exporters import OnnxExporter, TensorrtExporter
from compressor.exporters.tensorrt.profiles import BatchRange
from compressor.progress import Silent
from compressor.run.pipeline import run_passes
from compressor.run.plan import Plan, make_plan
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from compressor.spec.load import load_spec
from compressor.types.carrier import Carrier
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.exporters.tensorrt.engines import needs_rtx

pytestmark = [*benchmark(), needs_rtx]
SPECS = {"ResNet-20": "samples/cifar/spec.yaml", "digits": "samples/digits/spec.yaml"}
PASSES = {
    "float32": [{"pass": "fuse"}],
    "float16": [{"pass": "fuse"}, {"pass": "cast", "dtype": "fp16"}],
    "int8": [{"pass": "fuse"}, {"pass": "quantize-static"}],
}
ENGINE = TensorrtExporter(compute_capability=("8.6",), batch=BatchRange(opt=8, max=64))
PRODUCTS = ("correlation", "gemm", "deconv", "runtime_fusion")


def compressed(network: str, kind: str, folder: Path) -> tuple[Plan, Carrier]:
    """Run the passes of one kind on a sample's network, for TensorRT."""
    settings = [
        f"passes={json.dumps(PASSES[kind])}",
        'exports=[{"format": "onnx", "target": "tensorrt"}]',
        f"output={folder / 'out'}",
    ]
    plan = make_plan(load_spec(Path(SPECS[network]), settings))
    workspace = Workspace(plan, Store(folder / "store"), Silent())
    return plan, run_passes(workspace)[-1].carrier


@pytest.mark.parametrize("network", SPECS)
def test_engines(network: str, tmp_path: Path) -> None:
    if network == "ResNet-20" and "COMPRESSOR_DATA" not in os.environ:
        pytest.skip("COMPRESSOR_DATA names no folder of real data")
    rows = []
    for kind in PASSES:
        plan, carrier = compressed(network, kind, tmp_path / kind)
        hashes, seconds = set(), []
        for name in ("first", "second"):
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            start = time.perf_counter()
            files = ENGINE.write(carrier, folder, CONTEXT)
            seconds.append(time.perf_counter() - start)
            manifest = json.loads(files[1].read_text(encoding="utf-8"))
            hashes.add(manifest["engine"]["sha256"])
        onnx = OnnxExporter(target="tensorrt").predict(carrier)
        size = sum(path.stat().st_size for path in files)
        types = Counter(row["precision"] for row in manifest["layers"] if row["type"] in PRODUCTS)
        rows.append(
            [
                kind,
                f"{plan.bytes / 1e6:.2f} MB",
                f"{onnx / 1e6:.2f} MB",
                f"{size / 1e6:.2f} MB",
                f"{ENGINE.predict(carrier) / size:.3f}",
                " ".join(f"{s:.2f}" for s in seconds),
                ", ".join(f"{name} {count}" for name, count in sorted(types.items())),
                str(len(manifest["layers"])),
                "equal" if len(hashes) == 1 else "differ",
            ]
        )
    header = ["types", "float model", "ONNX", "engine", "predicted", "seconds of two builds"]
    show(
        f"{network}, TensorRT-RTX, compute capability 8.6, batch 1 to 64",
        [*header, "products by type", "layers", "two builds"],
        rows,
    )
