"""Time the steps of one cold start; runs as a process of its own.

``python -m compressor.run.timing.cold_start JOB`` reads a JSON document with ``name``, ``path``,
``format``, ``files``, ``options``, ``runtime`` (for an ONNX file, else ``null``), ``threads``
and ``batch`` (an ``.npz`` file), and prints another with seconds and bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.types.carrier import Runner
    from compressor.types.tensors import Batch

_RUNNERS = {
    "onnxruntime": "compressor.models.onnx.ort_session",
    "openvino": "compressor.models.onnx.runtimes",
    "torch": "compressor.models.torch.matching",
}
INPUT = "input "
"""What names of arrays in the file of a batch begin with, before those of the model's inputs."""

_CHUNK = 1 << 20
_STEADY_RUNS = 15
_STEADY_SECONDS = 1.0
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def cold_start(job: Mapping[str, Any]) -> dict[str, Any]:
    """Open and run an artifact in this process, which has done nothing yet.

    Returns:
        ``seconds`` of each step, and ``memory`` in bytes above the process's own with the runtime
        imported.

    Raises:
        CompressorError: the artifact cannot be opened or run.
    """
    begin = time.perf_counter()
    library = "torch" if job["runtime"] is None else job["runtime"]["library"]
    import_module(library)
    imported = time.perf_counter() - begin

    import numpy as np

    opener = _opener(job)
    from compressor.models.threads import on_threads, sessions_on_threads

    with np.load(job["batch"]) as stored:
        batch = {name.removeprefix(INPUT): array for name, array in stored.items()}
    with (on_threads if library == "torch" else sessions_on_threads)(job["threads"]):
        document = _started(opener, batch, [Path(file) for file in job["files"]])
    document["seconds"]["import"] = imported
    return document


def _started(opener: Callable[[], Runner], batch: Batch, files: Sequence[Path]) -> dict[str, Any]:
    import numpy as np

    seconds = {}
    dropped = _drop_pages(files)
    seconds["read_disk"] = _read(files)
    seconds["read_cache"] = _read(files)
    before = _start_of_peak()
    begin = time.perf_counter()
    runner = opener()
    seconds["create"] = time.perf_counter() - begin
    opened = _memory()
    begin = time.perf_counter()
    runner.run(batch)
    seconds["first"] = time.perf_counter() - begin
    times: list[float] = []
    while len(times) < _STEADY_RUNS and sum(times) < _STEADY_SECONDS:
        begin = time.perf_counter()
        runner.run(batch)
        times.append(time.perf_counter() - begin)
    seconds["steady"] = float(np.median(times))
    if not dropped:
        del seconds["read_disk"]
    return {"seconds": seconds, "memory": _difference(before, opened, _memory())}


def _opener(job: Mapping[str, Any]) -> Callable[[], Runner]:
    """Import everything that opening needs, and return the artifact's opener."""
    from compressor.catalog import load
    from compressor.models.onnx.runtimes import OnnxRuntime
    from compressor.run.artifact_file import ArtifactFile, Machinery

    path = Path(job["path"])
    if job["runtime"] is not None:
        runtime = OnnxRuntime(**job["runtime"])
        import_module(_RUNNERS[runtime.library])
        return partial(runtime.open, path, f"artifact {job['name']!r}")
    load("exporter", job["format"])
    artifact = ArtifactFile(job["name"], path, job["format"], (), job["options"])
    return artifact.opener(Machinery())


def _drop_pages(files: Sequence[Path]) -> bool:
    """Ask the kernel to drop the files from its cache; return whether that is possible."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # a file system that does neither
            return False
        finally:
            os.close(descriptor)
    return True


def _read(files: Sequence[Path]) -> float:
    buffer = bytearray(_CHUNK)
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - begin


def _start_of_peak() -> dict[str, int]:
    """Return the current memory, and reset the peak if the kernel can."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:  # not Linux, or not allowed
        return {}
    return _memory()


def _memory() -> dict[str, int]:
    """Return bytes of memory by the kernel's names, if it has them."""
    if not _STATUS.is_file():
        return {}
    lines = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in lines
        if words and words[0] in ("VmHWM:", "VmRSS:", "RssAnon:")
    }


def _difference(
    before: Mapping[str, int], opened: Mapping[str, int], ended: Mapping[str, int]
) -> dict[str, int] | None:
    """Return the peak above the start, and its anonymous part; ``None`` if unknown."""
    if not before or "RssAnon" not in ended:
        return None
    anonymous = max(opened["RssAnon"], ended["RssAnon"]) - before["RssAnon"]
    return {
        "peak": max(0, ended["VmHWM"] - before["VmRSS"]),
        "anonymous": max(0, anonymous),
    }


def main(job: str) -> int:
    """Print a job's result or error."""
    from compressor.errors import CompressorError
    from compressor.progress import quiet_libraries

    try:
        with quiet_libraries():
            document = cold_start(json.loads(Path(job).read_text(encoding="utf-8")))
    except CompressorError as error:
        document = {"error": [error.subject, error.problem, error.remedy]}
    sys.stdout.write(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
