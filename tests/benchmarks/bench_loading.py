"""Opening a quantized model of a gigabyte, beside ``safetensors`` and ``torch.load``.

Each opening takes place in a process of its own, in turn. What is timed starts after torch,
safetensors and this project have been imported. Files are in the page cache, and torch has one
thread. ``BENCH_MB`` sets the size of the model, ``BENCH_ROUNDS`` how often each contender opens it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from compressor.exporters import SafetensorsExporter
from compressor.models.codec.bit_stream import unpack_bits
from compressor.models.codec.load import load
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.exporter import ExportContext
from tests.compressor.exporters.hand_made import Builder, entry

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

MEGABYTES = int(os.environ.get("BENCH_MB", "1000"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "7"))
SIDE, GROUP = 4096, 128
KINDS = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4}
FIRST = "layer0.weight"
CHECKPOINT = "weights.pt"


# ------------------------------------------------------------------------------- the model


def make_model(folder: Path, kind: str, megabytes: int) -> int:
    """Write dense layers of 4096 by 4096; return how many."""
    dtype = KINDS[kind]
    layers = max(1, round(megabytes * 1e6 * 8 / (SIDE * SIDE * dtype.bitwidth)))
    made = Builder()
    x = value = entry(features=SIDE)
    for index in range(layers):
        name = f"layer{index}"
        codes = ir.LazyTensor(partial(_codes, index, dtype), dtype, ir.Shape((SIDE, SIDE)))
        rows = (SIDE // GROUP,) if kind == "int4" else ()
        scale = np.full((*rows, SIDE), 1e-3, np.float32)
        parts = [made.constant(f"{name}.weight", codes), made.constant(f"{name}.scale", scale)]
        axis = {"axis": 0, "block_size": GROUP} if kind == "int4" else {"axis": 1}
        floats = made.node("DequantizeLinear", parts, f"{name}.floats", **axis)
        value = made.node("MatMul", [value, floats], f"{name}.product")
        bias = made.constant(f"{name}.bias", np.zeros(SIDE, np.float32))
        value = made.node("Relu", [made.node("Add", [value, bias], f"{name}.sum")], name)
    folder.mkdir(parents=True)
    carrier = OnnxCarrier(made.model([x], value, SIDE))
    SafetensorsExporter().write(carrier, folder, ExportContext("bench", ""))
    return layers


def _codes(seed: int, dtype: ir.DataType) -> ir.TensorProtocol:
    noise = np.random.default_rng(seed)
    most = (1 << dtype.bitwidth - 1) - 1
    values = noise.integers(-most, most + 1, (SIDE, SIDE), np.int8)
    return ir.Tensor(values.astype(ml_dtypes.int4) if most == 7 else values, dtype=dtype)


# ------------------------------------------------------------------------------- the contenders


def by_compressor(folder: Path, mmap: bool) -> Callable[[], torch.Tensor]:
    """Open the model; its first weight comes as codes, one a byte."""
    module = load(folder, mmap=mmap)
    return lambda: module.state_dict()[FIRST]


def by_safetensors(folder: Path) -> Callable[[], torch.Tensor]:
    """Open the file; its first weight comes as it is stored."""
    file = safe_open(folder / "model.safetensors", framework="pt")
    return lambda: file.get_tensor(FIRST)  # type: ignore[no-any-return]


def by_torch(folder: Path, mmap: bool) -> Callable[[], torch.Tensor]:
    """Load what is stored in the file from a checkpoint of torch."""
    state = torch.load(folder / CHECKPOINT, weights_only=True, mmap=mmap)
    return lambda: state[FIRST]  # type: ignore[no-any-return]


def codes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes one a byte, as ``compressor.load`` hands them out."""
    return unpack_bits(tensor, 4, 2 * tensor.numel(), signed=True)


SAFE = "safe_open, get_tensor"
UNPACKED = "  and unpacked"
CONTENDERS: dict[str, Callable[[Path], Callable[[], torch.Tensor]]] = {
    SAFE: by_safetensors,
    UNPACKED: by_safetensors,
    "compressor.load": partial(by_compressor, mmap=True),
    "  mmap=False": partial(by_compressor, mmap=False),
    "torch.load": partial(by_torch, mmap=False),
    "  mmap=True": partial(by_torch, mmap=True),
}


def anonymous() -> int:
    """Return the bytes of anonymous memory that this process has."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def opened(name: str, folder: str) -> dict[str, float]:
    """Open a model in this process."""
    torch.set_num_threads(1)
    before, start = anonymous(), time.perf_counter()
    first = CONTENDERS[name](Path(folder))
    loaded = time.perf_counter()
    memory = anonymous() - before
    tensor = first()
    at_hand = time.perf_counter()
    codes_of(tensor) if name == UNPACKED else tensor.clone()
    read = time.perf_counter()
    return {
        "load": loaded - start,
        "tensor": at_hand - start,
        "read": read - start,
        "memory": memory,
    }


def called(how: str, folder: str) -> dict[str, float]:
    """Call a model several times in this process."""
    torch.set_num_threads(1)
    before = anonymous()
    module = load(folder, dequantize=how)  # type: ignore[arg-type]
    x, seconds = torch.randn(1, SIDE), []
    with torch.inference_mode():
        for _ in range(6):
            start = time.perf_counter()
            module(x)
            seconds.append(time.perf_counter() - start)
    later = statistics.median(seconds[1:])
    return {"first": seconds[0], "later": later, "memory": anonymous() - before}


def first_read(verify: str, what: str, folder: str) -> dict[str, float]:
    """Read all of a model for the first time, in this process.

    Args:
        verify: compare tensors with their checksums, where it is not empty.
        what: ``call`` the model; ``copy`` each tensor; the latter ``from disk``, with none of the
            file is in the page cache; or ``safe_open``, which copies each tensor too.
    """
    torch.set_num_threads(1)
    weights = Path(folder) / "model.safetensors"
    if what == "from disk":
        with weights.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    x, start = torch.randn(1, SIDE), (time.perf_counter(), time.process_time())
    module = None if what == "safe_open" else load(folder, verify=bool(verify))
    loaded = time.process_time()
    with torch.inference_mode():
        if module is None:
            with safe_open(weights, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    file.get_tensor(name).clone()
        elif what == "call":
            module(x)
        else:
            for tensor in module.state_dict().values():
                tensor.clone()
    seconds = time.perf_counter() - start[0]
    return {"load": loaded - start[1], "wall": seconds, "cpu": time.process_time() - start[1]}


def in_a_process(function: str, *arguments: str) -> dict[str, float]:
    """Run one of the functions above in a fresh process."""
    code = (
        "import sys, json; from tests.benchmarks import bench_loading as b; "
        "print(json.dumps(getattr(b, sys.argv[1])(*sys.argv[2:])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, function, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


# ------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize("kind", KINDS)
def test_opening(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / kind
    try:
        layers = make_model(folder, kind, MEGABYTES)
        torch.save(load_file(folder / "model.safetensors"), folder / CHECKPOINT)
        size = (folder / "model.safetensors").stat().st_size
        names = [name for name in CONTENDERS if kind == "int4" or name != UNPACKED]
        results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                results[name].append(in_a_process("opened", name, str(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [
        f"{kind}, {layers} layers, {size / 1e9:.2f} GB; {ROUNDS} rounds, medians, no imports",
        "ms until it is loaded, its first weight (16.8 M codes) is at hand, and was read once",
        "as it is handed out (by compressor.load one code a byte); x is to get_tensor of codes",
        f"{'':24}{'loaded':>10}{'at hand':>10}{'x':>7}{'read':>10}{'x':>7}{'anonymous MB':>14}",
    ]
    base = _medians(results[UNPACKED if UNPACKED in results else SAFE])
    for name, found in results.items():
        own = _medians(found)
        lines.append(
            f"{name:24}{1e3 * own['load']:10.2f}"
            f"{1e3 * own['tensor']:10.2f}{own['tensor'] / base['tensor']:7.2f}"
            f"{1e3 * own['read']:10.2f}{own['read'] / base['read']:7.2f}{own['memory'] / 1e6:14.1f}"
        )
    show(capsys, lines)


@pytest.mark.parametrize("kind", KINDS)
def test_calling(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / kind
    try:
        layers = make_model(folder, kind, MEGABYTES // 8)
        size = (folder / "model.safetensors").stat().st_size
        results: dict[str, list[dict[str, float]]] = {"on-use": [], "once": []}
        for _ in range(max(1, ROUNDS // 2)):
            for how, found in results.items():
                found.append(in_a_process("called", how, str(folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [
        f"{kind}, {layers} layers, {size / 1e6:.0f} MB, one row of input, one thread, medians",
        f"{'dequantize':24}{'first ms':>10}{'later ms':>10}{'anonymous MB':>14}",
    ]
    for how, found in results.items():
        own = _medians(found)
        lines.append(
            f"{how:24}{1e3 * own['first']:10.0f}{1e3 * own['later']:10.0f}"
            f"{own['memory'] / 1e6:14.0f}"
        )
    show(capsys, lines)


@pytest.mark.parametrize("kind", KINDS)
def test_checking(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / kind
    cases = [(w, verify) for w in ("call", "copy", "from disk") for verify in ("", "verify")]
    cases.append(("safe_open", ""))
    results: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    try:
        layers = make_model(folder, kind, MEGABYTES)
        size = (folder / "model.safetensors").stat().st_size
        for _ in range(ROUNDS):
            for what, verify in cases:
                one = in_a_process("first_read", verify, what, str(folder))
                results[what, verify].append(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [
        f"{kind}, {layers} layers, {size / 1e9:.2f} GB, read for the first time; {ROUNDS} rounds",
        f"{'':24}{'load CPU ms':>12}{'CPU ms':>10}{'x':>7}{'wall ms':>10}{'x':>7}",
    ]
    for (what, verify), found in results.items():
        own, base = _medians(found), _medians(results[what, ""])
        lines.append(
            f"{what} {verify:19}{1e3 * own['load']:12.1f}"
            f"{1e3 * own['cpu']:10.0f}{own['cpu'] / base['cpu']:7.2f}"
            f"{1e3 * own['wall']:10.0f}{own['wall'] / base['wall']:7.2f}"
        )
    show(capsys, lines)


def _medians(found: list[dict[str, float]]) -> Mapping[str, Any]:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def show(capsys: pytest.CaptureFixture[str], lines: list[str]) -> None:
    """Print a table."""
    with capsys.disabled():
        print("", *lines, sep="\n")
