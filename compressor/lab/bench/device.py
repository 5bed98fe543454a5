"""Time artifacts on another device, over ssh or adb, and bring the times back."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, Literal

import numpy as np

import compressor
from compressor import errors
from compressor.errors import InputError, SpecError
from compressor.files import copy, scratch
from compressor.lab.bench import on_device
from compressor.models import litert, threads
from compressor.models.onnx import ort_session, runtimes
from compressor.run.artifact_file import ONNX, ArtifactFile
from compressor.run.timing import timing
from compressor.run.timing.timing import Latencies
from compressor.types import tensors
from compressor.types.tensors import Batch

_SENT: tuple[ModuleType, ...] = (
    errors,
    litert,
    on_device,
    ort_session,
    runtimes,
    tensors,
    threads,
    timing,
)
_ROOT = Path(compressor.__file__).parents[1]
_RUNTIMES = {"ort": "onnxruntime", "openvino": "openvino", "litert": "litert"}  # by format
_SECONDS = 3600.0  # that a device may take for everything
_CONNECT = 10  # seconds


@dataclass(frozen=True)
class Device:
    """A device that commands can be run on.

    Attributes:
        kind: how it is reached.
        name: the host as ssh takes it, or the serial number as ``adb devices`` prints it.
        python: the command that starts Python there.
    """

    kind: Literal["ssh", "adb"]
    name: str
    python: str = "python3"

    def command(self, script: str) -> list[str]:
        """Return the command that runs a shell script there.

        Raises:
            SpecError: the program that reaches it is missing here, or the name is an option.
        """
        if shutil.which(self.kind) is None:
            raise SpecError(
                f"--{self.kind}", f"needs the program {self.kind}, which is not here", "install it"
            )
        if not self.name or self.name.startswith("-"):
            raise SpecError(f"--{self.kind} {self.name}", "names no device", "check its spelling")
        if self.kind == "adb":
            return ["adb", "-s", self.name, "shell", script]
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"]
        return ["ssh", *options, "--", self.name, script]

    def timed(self, folder: Path) -> dict[str, Any]:
        """Send a folder, let :mod:`on_device` time what it holds, and return what it printed.

        Nothing stays on the device.

        Raises:
            SpecError: see :meth:`command`.
            InputError: it cannot be reached, or does not run what it was sent.
        """
        script = (
            'd=$(mktemp -d) && tar -xf - -C "$d" && cd "$d" && '
            f"PYTHONPATH=. {self.python} -m {on_device.__name__}; "
            's=$?; cd / && rm -rf "$d"; exit $s'
        )
        subject, command = f"--{self.kind} {self.name}", self.command(script)
        with TemporaryFile() as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(folder, ".")
            packed.seek(0)
            try:
                done = subprocess.run(
                    command, stdin=packed, capture_output=True, timeout=_SECONDS, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise InputError(
                    subject, f"gave no answer in {_SECONDS:.0f} s", "give less --seconds"
                ) from error
        said = done.stderr.decode(errors="replace").strip().splitlines()
        try:
            result: dict[str, Any] = json.loads(done.stdout.decode().strip().splitlines()[-1])
        except (IndexError, ValueError) as error:
            why = said[-1] if said else f"exit code {done.returncode}"
            raise InputError(
                subject,
                f"did not time the files ({why})",
                f"check that it can be reached, and has {self.python} with numpy",
            ) from error
        if "error" in result:
            of, problem, remedy = result["error"]
            raise InputError(f"{subject}: {of}", str(problem), str(remedy))
        return result


@dataclass(frozen=True)
class DeviceTimes:
    """What a device has measured.

    Attributes:
        runtimes: by the artifact's name.
        sizes: latencies by the size of the batch.
    """

    runtimes: Mapping[str, str]
    sizes: Mapping[int, Latencies]


def timed_on(
    device: Device,
    artifacts: Sequence[ArtifactFile],
    batches: Mapping[int, Batch],
    *,
    threads: int,
    seconds: float,
    precision: float,
) -> DeviceTimes:
    """Time artifacts on a device, in turn and in the same blocks as here.

    Args:
        batches: what they are run on, by size.
        seconds: for each size; see :func:`compressor.run.timing.timing.measure`.

    Raises:
        SpecError: an artifact is of a format that is not sent to devices.
        InputError: the device cannot be reached, or lacks something.
    """
    plan: dict[str, Any] = {"artifacts": {}, "sizes": list(batches), "threads": threads}
    plan |= {"seconds": seconds, "precision": precision}
    with scratch() as folder:
        for number, artifact in enumerate(artifacts):
            place = folder / str(number)
            place.mkdir()
            for file in artifact.files:
                copy(file, place / file.name, link=True)
            plan["artifacts"][artifact.name] = {
                "file": f"{number}/{artifact.path.name}",
                "runtime": _runtime(artifact),
                "merge": not ort_session.merges_halves(artifact.path),  # needs a package to tell
            }
        for module in _SENT:
            _send(Path(str(module.__file__)), folder)
        (folder / on_device.PLAN).write_text(json.dumps(plan), encoding="utf-8")
        arrays = {
            f"{number}{on_device.SEPARATOR}{name}": array
            for number, batch in enumerate(batches.values())
            for name, array in batch.items()
        }
        np.savez(folder / on_device.INPUTS, **arrays)  # type: ignore[arg-type]  # of its keyword
        result = device.timed(folder)
    sizes = {}
    for size, found in zip(batches, result["sizes"], strict=True):
        times = {n: [np.asarray(a) for a in each] for n, each in found["seconds"].items()}
        sizes[size] = Latencies(size, times, found["clock"], found["load"])
    return DeviceTimes(result["runtimes"], sizes)


def _runtime(artifact: ArtifactFile) -> str:
    if artifact.format == ONNX:
        return "openvino" if artifact.options.get("target") == "openvino" else "onnxruntime"
    if artifact.format not in _RUNTIMES:
        raise SpecError(
            f"artifact {artifact.name!r}",
            f"is of the format {artifact.format}, which is not timed on devices",
            f"give files of {', '.join((ONNX, *_RUNTIMES))}",
        )
    return _RUNTIMES[artifact.format]


def _send(path: Path, folder: Path) -> None:
    """Copy a module of this package, and what makes its folders packages."""
    parts = path.relative_to(_ROOT)
    (folder / parts).parent.mkdir(parents=True, exist_ok=True)
    copy(path, folder / parts)
    for parent in parts.parents:
        if parent != Path() and not (folder / parent / "__init__.py").exists():
            copy(_ROOT / parent / "__init__.py", folder / parent / "__init__.py")
