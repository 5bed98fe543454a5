"""Cold starts of several artifacts in turn, each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import ArtifactError
from compressor.files import scratch
from compressor.run.artifact_file import ArtifactFile, Machinery
from compressor.run.timing.cold_start import INPUT
from compressor.types.tensors import Batch

ROUNDS = 5
_LEAST_ROUNDS = 3
_LONGEST = 600  # seconds that one cold start may take


def cold_starts(
    artifacts: Sequence[ArtifactFile],
    machinery: Machinery,
    batch: Batch,
    budget: float,
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Start each artifact several times, in turn, and return the medians in their order.

    Args:
        budget: seconds after which no round begins, once there were three.
        advance: called with the number of starts so far.

    Raises:
        ArtifactError: a process dies, or its artifact cannot be opened.
    """
    all_starts: list[list[dict[str, Any]]] = [[] for _ in artifacts]
    begin = time.monotonic()
    with scratch() as folder:
        stored = folder / "batch.npz"
        # An input may have the name of one of the function's own arguments.
        arrays: dict[str, Any] = {f"{INPUT}{name}": array for name, array in batch.items()}
        np.savez(stored, allow_pickle=False, **arrays)
        jobs = [
            _job(artifact, machinery, stored, folder / f"{i}.json")
            for i, artifact in enumerate(artifacts)
        ]
        for done in range(ROUNDS):
            if done >= _LEAST_ROUNDS and time.monotonic() - begin > budget:
                break
            for i, artifact in enumerate(artifacts):
                all_starts[i].append(_started(artifact.name, jobs[i]))
                advance(done * len(artifacts) + i + 1)
    return [summarized(starts) for starts in all_starts]


def summarized(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and ranges of several starts of one artifact, in milliseconds and bytes.

    A step that one of them could not measure is ``None``, and so is memory.
    """
    steps = ("import", "read_disk", "read_cache", "create", "first", "steady")
    memories = [start["memory"] for start in starts]
    return {
        "rounds": len(starts),
        "milliseconds": {
            step: _spread([1e3 * s["seconds"][step] for s in starts if step in s["seconds"]])
            for step in steps
        },
        "memory": None
        if None in memories
        else {key: _spread([float(m[key]) for m in memories]) for key in ("peak", "anonymous")},
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": float(np.median(values)), "least": min(values), "most": max(values)}


def _job(artifact: ArtifactFile, machinery: Machinery, batch: Path, target: Path) -> Path:
    runtime = artifact.runtime(machinery)
    document = {
        "name": artifact.name,
        "path": str(artifact.path.absolute()),
        "format": artifact.format,
        "files": [str(file.absolute()) for file in artifact.files],
        "options": dict(artifact.options),
        "runtime": None if runtime is None else asdict(runtime),
        "threads": machinery.threads,
        "batch": str(batch),
    }
    target.write_text(json.dumps(document), encoding="utf-8")
    return target


def _started(name: str, job: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "compressor.run.timing.cold_start", str(job)]
    subject = f"artifact {name!r}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            subject, f"does not start in {_LONGEST} seconds", "leave cold starts out: --no-cold"
        ) from error
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
        raise ArtifactError(
            subject,
            f"ends the process that starts it, with {done.returncode} ({last})",
            "check that enough memory is free, or leave cold starts out: --no-cold",
        )
    result: dict[str, Any] = json.loads(done.stdout)
    if "error" in result:
        raise ArtifactError(*result["error"])
    return result
