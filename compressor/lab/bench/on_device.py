"""What runs on a device: open files in the runtimes that are there, time them, print the times.

It is sent there with the few modules that it imports, and needs Python, numpy and the runtimes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compressor.errors import CompressorError
from compressor.models.litert import LitertRunner
from compressor.models.onnx.runtimes import OnnxRuntime
from compressor.models.threads import sessions_on_threads
from compressor.run.timing.timing import Opener, measure
from compressor.types.tensors import Batch

PLAN, INPUTS = "plan.json", "inputs.npz"
SEPARATOR = "/"  # between the number of a batch and the name of an input


def timed(folder: Path) -> dict[str, Any]:
    """Time the files in a folder, as its plan says.

    Returns:
        ``runtimes`` by name, and ``sizes``: for each batch size, the arrays of
        :class:`compressor.run.timing.timing.Latencies` as lists.

    Raises:
        CompressorError: a file cannot be opened or run.
    """
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    openers = {name: _opener(folder, name, entry) for name, entry in plan["artifacts"].items()}
    with np.load(folder / INPUTS) as arrays:
        batches = _batches({key: arrays[key] for key in arrays.files})
    found = []
    with sessions_on_threads(plan["threads"]):
        runtimes = {name: opener().runtime for name, opener in openers.items()}
        for size, batch in zip(plan["sizes"], batches, strict=True):
            times = measure(openers, [batch], plan["seconds"], plan["precision"])
            seconds = {name: [a.tolist() for a in each] for name, each in times.seconds.items()}
            found.append(
                {"batch": size, "seconds": seconds, "clock": times.clock, "load": times.load}
            )
    return {"runtimes": runtimes, "sizes": found}


def _opener(folder: Path, name: str, entry: Mapping[str, Any]) -> Opener:
    path, subject = folder / entry["file"], f"artifact {name!r}"
    if entry["runtime"] == "litert":
        return partial(LitertRunner, path, subject)
    library: Literal["openvino", "onnxruntime"] = entry["runtime"]
    runtime = OnnxRuntime(library, merge=entry["merge"])
    return partial(runtime.open, path, subject)


def _batches(arrays: Mapping[str, Any]) -> Sequence[Batch]:
    """Return the batches of arrays that are named by their number and their input."""
    found: dict[int, dict[str, Any]] = {}
    for key, array in arrays.items():
        number, _, name = key.partition(SEPARATOR)
        found.setdefault(int(number), {})[name] = array
    return [found[number] for number in sorted(found)]


def main() -> None:
    """Print what was measured as one JSON document; failures too, in a line of their own."""
    try:
        result = timed(Path.cwd())
    except CompressorError as error:
        result = {"error": [error.subject, error.problem, error.remedy]}
    except ImportError as error:
        problem = f"lacks a Python package ({error})"
        result = {"error": ["the device", problem, "install it there, with numpy"]}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
