"""Streaming int4-g128 over a checkpoint that is not in the page cache, beside ``cp`` and a loop.

Each contender runs in a process of its own, on input that was evicted before, and its output is
flushed to the disk within the time. ``BENCH_GIB`` sets the size of the input, ``BENCH_ROUNDS`` how
often each contender runs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.models.codec import headers as container
from compressor.run.store import store_of

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

GIB = float(os.environ.get("BENCH_GIB", "6"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
SHARD = 2_000_000_000
WIDTH, KEYS, MIDDLE = 4096, 1024, 14336
LAYER = {
    "input_layernorm.weight": (WIDTH,),
    "self_attn.q_proj.weight": (WIDTH, WIDTH),
    "self_attn.k_proj.weight": (KEYS, WIDTH),
    "self_attn.v_proj.weight": (KEYS, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "post_attention_layernorm.weight": (WIDTH,),
    "mlp.gate_proj.weight": (MIDDLE, WIDTH),
    "mlp.up_proj.weight": (MIDDLE, WIDTH),
    "mlp.down_proj.weight": (WIDTH, MIDDLE),
}


# ------------------------------------------------------------------------------- the checkpoint


def make_checkpoint(folder: Path, nbytes: float) -> None:
    """Write a checkpoint of Llama-shaped layers in bfloat16.

    The values are normal; a pool of 64 MiB of them serves all tensors, each from another place on.
    """
    one = 2 * sum(int(np.prod(shape)) for shape in LAYER.values())
    layers = max(1, ceil(nbytes / one))
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": MIDDLE,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for layer in range(layers):
        for name, shape in LAYER.items():
            own = 2 * int(np.prod(shape))
            if size + own > SHARD:
                shards.append({})
                size = 0
            shards[-1][f"model.layers.{layer}.{name}"] = shape
            size += own
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    places = {t: n for n, shard in zip(names, shards, strict=True) for t in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(1 << 25, generator=generator) * 0.02).to(torch.bfloat16)
    twice = torch.cat([pool, pool]).view(torch.uint8).numpy()
    chance = np.random.default_rng(0)
    for name, shard in zip(names, shards, strict=True):
        described = [
            container.Described(t, "BF16", shape, 16, 2 * int(np.prod(shape)))
            for t, shape in shard.items()
        ]
        with (folder / name).open("wb") as stream:
            stream.write(container.layout(described, {"format": "pt"}).header)
            for tensor in sorted(described, key=lambda t: t.name):
                left = tensor.nbytes
                while left:
                    start = 2 * int(chance.integers(0, 1 << 25))
                    piece = min(left, pool.nbytes)
                    stream.write(twice[start : start + piece].data)
                    left -= piece
            stream.flush()
            os.fsync(stream.fileno())


def evict(folder: Path) -> float:
    """Drop a folder's files from the page cache; return the share that is still there."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    held, pages = map(sum, zip(*(resident(p) for p in folder.iterdir()), strict=True))
    return held / pages


def resident(path: Path) -> tuple[int, int]:
    """Count the pages of a file that are in the page cache, and all its pages."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as file:
        there = (ctypes.c_ubyte * pages)()
        view = ctypes.c_char.from_buffer(file)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            asked = (ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), there)
            if libc.mincore(*asked):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del view
        return int((np.frombuffer(there, np.uint8) & 1).sum()), pages


# ------------------------------------------------------------------------------- the contenders


def ours(source: Path, target: Path) -> None:
    """Stream it through the exporter."""
    from compressor.exporters.safetensors.exporter import SafetensorsExporter
    from compressor.models.checkpoint.carrier import open_checkpoint
    from compressor.passes.quantize.weights.weights import QuantizeWeights
    from compressor.types.exporter import ExportContext
    from compressor.types.passes import PassContext

    declared = QuantizeWeights(preset="int4-g128")
    outcome = declared.apply(open_checkpoint(source), PassContext(), {})
    exporter = SafetensorsExporter()
    exporter.check(outcome.carrier)
    target.mkdir()
    exporter.write(outcome.carrier, target, ExportContext("bench", ""))


def plain_loop(source: Path, target: Path) -> None:
    """Quantize shard by shard and tensor by tensor with the usual torch calls."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        out: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                weight = file.get_tensor(name)
                if weight.dim() != 2:
                    out[name] = weight
                    continue
                rows = weight.shape[0]
                groups = weight.float().view(rows, -1, 128)
                low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
                scale = torch.maximum(low / -8, high / 7).to(torch.bfloat16)
                codes = groups.div_(scale).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
                codes = codes.view(rows, -1)
                packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int32)
                base = name.removesuffix(".weight")
                out[f"{base}.weight_packed"] = packed
                out[f"{base}.weight_scale"] = scale.squeeze(-1)
                out[f"{base}.weight_shape"] = torch.tensor(weight.shape)
        save_file(out, target / path.name)
    flush(target)


def flush(folder: Path) -> None:
    """Force a folder's files to the disk."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "plain PyTorch loop": plain_loop,
    "compressor": ours,
}
COPY, COMMAND = "cp -r", "compress quantize"


def command_of(name: str, source: Path, target: Path) -> list[str]:
    """Return the command of a contender's process."""
    if name == COPY:
        return ["cp", "-r", str(source), str(target)]
    if name == COMMAND:
        command = [sys.executable, "-m", "compressor", "quantize", str(source), "--no-check"]
        command += ["-o", str(target)]
        return [*command, "--preset", "int4-g128"]
    code = "import sys; from tests.benchmarks import bench_streaming as b; b.child(*sys.argv[1:])"
    return [sys.executable, "-c", code, name, str(source), str(target)]


def child(name: str, source: str, target: str) -> None:
    """Run a contender in this process, and print how long it took once torch was imported."""
    start = time.perf_counter()
    CONTENDERS[name](Path(source), Path(target))
    print(time.perf_counter() - start)


# ------------------------------------------------------------------------------- the measurement


@dataclass(frozen=True)
class Result:
    """One run of a contender: seconds of the whole process, and without importing torch."""

    seconds: float
    work: float
    anonymous: int
    output: int
    cached: float


def anonymous_bytes(process: int) -> int:
    """Read how much anonymous memory a process holds now."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return next(found, 0)


def measure(name: str, source: Path, target: Path) -> Result:
    """Run a contender on evicted input, and watch its memory."""
    shutil.rmtree(target, ignore_errors=True)
    cached = evict(source)
    start = time.perf_counter()
    with subprocess.Popen(
        command_of(name, source, target), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.01)
        printed, errors = process.communicate()
        assert process.returncode == 0, errors
    if name == COPY:
        flush(target)
    seconds = time.perf_counter() - start
    work = float(printed) if name in CONTENDERS else seconds
    output = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    shutil.rmtree(target)
    shutil.rmtree(store_of(target), ignore_errors=True)
    return Result(seconds, work, peak, output, cached)


def test_streaming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "checkpoint"
    try:
        make_checkpoint(source, GIB * 2**30)
        size = sum(p.stat().st_size for p in source.iterdir())
        names = [COPY, *CONTENDERS, COMMAND]
        results: dict[str, list[Result]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                results[name].append(measure(name, source, tmp_path / "out"))
    finally:
        shutil.rmtree(source, ignore_errors=True)
    base = statistics.median(r.seconds for r in results[COPY])
    lines = [
        f"{size / 1e9:.2f} GB of bfloat16, {ROUNDS} rounds; GB of input a second, of which "
        f"{max(r.cached for found in results.values() for r in found):.1%} was in the page cache",
        "median of the whole process, best, and median without importing torch",
        f"{'':20}{'median':>8}{'best':>8}{'work':>8}{'x cp':>8}{'anonymous MB':>14}{'output':>16}",
    ]
    for name, found in results.items():
        median = statistics.median(r.seconds for r in found)
        lines.append(
            f"{name:20}{size / median / 1e9:8.3f}{size / min(r.seconds for r in found) / 1e9:8.3f}"
            f"{size / statistics.median(r.work for r in found) / 1e9:8.3f}"
            f"{base / median:8.2f}{max(r.anonymous for r in found) / 1e6:14.0f}"
            f"{found[0].output:16,}"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
