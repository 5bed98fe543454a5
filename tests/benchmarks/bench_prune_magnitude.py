"""Half of a bfloat16 checkpoint's weights ranked together and made zero, streamed, beside ``cp``.

Each contender runs in a process of its own, on input that was evicted from the page cache before,
and its output is flushed to the disk within the time. ``BENCH_GIB`` sets the size of the input,
``BENCH_ROUNDS`` how often each contender runs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.benchmarks.bench_streaming import anonymous_bytes, evict, flush, make_checkpoint

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

GIB = float(os.environ.get("BENCH_GIB", "1"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
COPY = "cp -r"
STEPS = {
    "weights, global": {"scope": "global"},
    "weights, by layer": {"scope": "layer"},
    "blocks 1x4, global": {"scope": "global", "granularity": "block", "block": (1, 4)},
    "blocks 16x16, global": {"scope": "global", "granularity": "block", "block": (16, 16)},
}


@dataclass(frozen=True)
class Result:
    """One run of a contender: seconds, those before writing, and the peak of its own memory."""

    seconds: float
    ranking: float
    anonymous: int


def child(name: str, source: str, target: str) -> None:
    """Prune in this process; print the seconds of ranking and of all, once torch is imported."""
    from compressor.exporters.safetensors.exporter import SafetensorsExporter
    from compressor.models.checkpoint.carrier import open_checkpoint
    from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
    from compressor.types.exporter import ExportContext
    from compressor.types.passes import PassContext

    start = time.perf_counter()
    step = PruneMagnitude.model_validate({"sparsity": 0.5, **STEPS[name]})
    outcome = step.apply(open_checkpoint(Path(source)), PassContext(), {})
    ranking = time.perf_counter() - start
    Path(target).mkdir()
    SafetensorsExporter().write(outcome.carrier, Path(target), ExportContext("bench", ""))
    print(ranking, time.perf_counter() - start)


def measure(name: str, source: Path, target: Path) -> Result:
    """Run a contender on evicted input, and watch its memory."""
    shutil.rmtree(target, ignore_errors=True)
    evict(source)
    code = f"import sys; from {__name__} import child; child(*sys.argv[1:])"
    command: Sequence[str] = [sys.executable, "-c", code, name, str(source), str(target)]
    if name == COPY:
        command = ["cp", "-r", str(source), str(target)]
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.01)
        printed, errors = process.communicate()
        assert process.returncode == 0, errors
    if name == COPY:
        flush(target)
        seconds, ranking = time.perf_counter() - start, 0.0
    else:
        ranking, seconds = map(float, printed.split())
    shutil.rmtree(target)
    return Result(seconds, ranking, peak)


def test_prune_magnitude(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "checkpoint"
    try:
        make_checkpoint(source, GIB * 2**30)
        size = sum(path.stat().st_size for path in source.iterdir())
        results: dict[str, list[Result]] = {name: [] for name in (COPY, *STEPS)}
        for _ in range(ROUNDS):
            for name, found in results.items():
                found.append(measure(name, source, tmp_path / "out"))
    finally:
        shutil.rmtree(source, ignore_errors=True)
    base = statistics.median(r.seconds for r in results[COPY])
    lines = [
        f"{size / 1e9:.2f} GB of bfloat16, {ROUNDS} rounds; GB of input a second, once torch is "
        "imported",
        f"{'':22}{'median':>8}{'best':>8}{'ranking':>9}{'x cp':>8}{'anonymous MB':>14}",
    ]
    for name, found in results.items():
        median = statistics.median(r.seconds for r in found)
        ranking = statistics.median(r.ranking for r in found)
        lines.append(
            f"{name:22}{size / median / 1e9:8.3f}{size / min(r.seconds for r in found) / 1e9:8.3f}"
            f"{ranking:8.2f}s{base / median:8.2f}{max(r.anonymous for r in found) / 1e6:14.0f}"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
