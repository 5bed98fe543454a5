"""Build an engine in a process of its own, with either builder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from compressor.errors import ArtifactError, CompressorError, SpecError
from compressor.exporters.tensorrt import build_process
from compressor.exporters.tensorrt.profiles import ShapeRange
from compressor.files import publish, staging

_KEPT = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_SHOWN = 400
_LEAVE_OUT = "write that part of the model with other operators, or leave out the export tensorrt"
BuilderName = Literal["rtx", "gpu"]
_NO_GPU = "TensorRT engines run on NVIDIA GPUs only, and this machine has none"


@dataclass(frozen=True)
class Settings:
    """What an engine is built with.

    Attributes:
        capabilities: compute capabilities; none leaves the choice to the builder.
        hardware: name of a hardware compatibility level; empty for the GPU at hand.
        timing_cache: what earlier builds measured; ``None`` without a cache.
    """

    package: str
    capabilities: tuple[str, ...] = ()
    profiles: Mapping[str, ShapeRange] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    hardware: str = ""
    timing_cache: bytes | None = None


@dataclass(frozen=True)
class Engine:
    """A built engine.

    Attributes:
        layers: the builder's report of its layers, as it words it.
        timing_cache: what was measured, added to what was known; ``None`` without a cache.
    """

    plan: bytes
    layers: str
    timing_cache: bytes | None
    settings: Settings


def build(model: Path, settings: Settings) -> Engine:
    """Build an engine.

    Args:
        model: an ONNX file in a folder of its own, which is the process's working folder.

    Raises:
        SpecError: the parser does not take the model, or this version a setting.
        ArtifactError: the builder returns no engine, or does not report its layers.
    """
    folder = model.parent
    if settings.timing_cache is not None:
        (folder / build_process.CACHE).write_bytes(settings.timing_cache)
    request = {
        "model": model.name,
        "capabilities": [f"SM{name.replace('.', '')}" for name in settings.capabilities],
        "flags": list(settings.flags),
        "hardware": settings.hardware,
        "profiles": {n: [p.min, p.opt, p.max] for n, p in settings.profiles.items()},
        "timing_cache": settings.timing_cache is not None,
    }
    answer = _ask(folder, settings.package, request)
    if "layers" not in answer:
        raise _error(answer, settings)
    if not answer["layers"]:
        raise ArtifactError(
            f"package {settings.package!r}",
            "does not report the layers of the engine that it built",
            "report it with the version of the package",
        )
    cache = None
    if settings.timing_cache is not None:
        cache = (folder / build_process.CACHE).read_bytes()
    return Engine((folder / build_process.ENGINE).read_bytes(), answer["layers"], cache, settings)


def unsupported(folder: Path, package: str, operators: Sequence[str]) -> frozenset[str]:
    """Return those operators that the parser does not know.

    Args:
        folder: an empty one, for the process.
    """
    return frozenset(_ask(folder, package, {"operators": sorted(set(operators))})["lacking"])


def unknown_operator(node: str, operator: str) -> SpecError:
    """Return the error for a node that the parser has no operator for."""
    return SpecError(
        f"node {node!r} ({operator})",
        f"operator {operator} is not known to TensorRT's ONNX parser",
        _LEAVE_OUT,
    )


def _ask(folder: Path, package: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the process's answer to a request."""
    spec = find_spec(package)
    assert spec is not None  # it has been imported
    assert spec.origin is not None
    place = {"package": package, "folder": str(Path(spec.origin).parents[1])}
    text = json.dumps({**place, **request})
    (folder / build_process.REQUEST).write_text(text, encoding="utf-8")
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-B", build_process.__file__],
        cwd=folder,
        env={**environment, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    answer = folder / build_process.ANSWER
    if not answer.is_file():
        output = done.stderr.strip() or done.stdout.strip() or "it printed nothing"
        words = output.splitlines()[-1][:_SHOWN]
        raise ArtifactError(
            f"package {package!r}",
            f"ended with code {done.returncode} before it answered ({words})",
            "free memory or space for temporary files if it ran out of them; otherwise report "
            "it with the spec",
        )
    content: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return content


def _error(answer: Mapping[str, Any], settings: Settings) -> CompressorError:
    """Turn the process's answer into an error with a remedy."""
    if "refused" in answer:
        refused = answer["refused"]
        node, operator = refused["node"], refused["operator"]
        if not refused["known"]:
            return unknown_operator(node, operator)
        return SpecError(
            f"node {node!r} ({operator})" if operator else "the graph",
            f"is refused by TensorRT's ONNX parser ({refused['reason'][:_SHOWN]})",
            _LEAVE_OUT,
        )
    if "unknown" in answer:
        return SpecError(
            f"export tensorrt: {answer['unknown'].lower().replace('_', '-')}",
            f"is not known to the installed version of {settings.package}",
            "leave it out, or install another version",
        )
    if "stale" in answer:
        return SpecError(
            "timing-cache",
            "was written by another version of TensorRT or for another GPU",
            "name another file, or remove that one",
        )
    targets = ", ".join(settings.capabilities)
    return ArtifactError(
        f"package {settings.package!r}",
        f"cannot build an engine{f' for {targets}' if targets else ''} "
        f"({answer['failed'][:_SHOWN] or 'no reason given'})",
        "change what it names, choose other targets, or leave out the export tensorrt",
    )


def read_cache(folder: Path, name: str | None) -> bytes | None:
    """Return what earlier builds measured; empty where there was none.

    Args:
        folder: the spec's.
        name: the file, relative to it; ``None`` where no cache is wanted.

    Raises:
        SpecError: it is not a file.
    """
    if name is None:
        return None
    path = folder / name
    if path.is_dir():
        raise SpecError(f"timing-cache {name!r}", "is a folder", "name a file")
    return path.read_bytes() if path.is_file() else b""


def write_cache(folder: Path, name: str | None, content: bytes | None) -> None:
    """Write all measurements so far, in one step."""
    if name is None or content is None:
        return
    path = folder / name
    with staging(path.parent) as staged:
        (staged / path.name).write_bytes(content)
        publish(staged / path.name, path)


@dataclass(frozen=True)
class Builder:
    """One of the packages: its Python module, and the distribution that pip installs.

    Attributes:
        source: where pip finds it.
        needs_gpu: it builds only on a machine with an NVIDIA GPU, and for that GPU.
    """

    package: str
    distribution: str
    source: str
    needs_gpu: bool


BUILDERS: dict[BuilderName, Builder] = {
    "rtx": Builder("tensorrt_rtx", "tensorrt-rtx", "", needs_gpu=False),
    "gpu": Builder("tensorrt", "tensorrt", ", from NVIDIA's package index", needs_gpu=True),
}


def loaded(name: BuilderName) -> ModuleType:
    """Import a builder's package.

    Raises:
        SpecError: it is not installed or does not import, or it needs a GPU and there is none.
    """
    builder = BUILDERS[name]
    subject = f"export tensorrt: builder {name!r}"
    other = "gpu" if name == "rtx" else "rtx"
    remedy = f"pip install {builder.distribution}{builder.source}, or set builder: {other}"
    if find_spec(builder.package) is None:
        raise SpecError(subject, f"needs {builder.distribution}, which is not installed", remedy)
    if builder.needs_gpu and not torch.cuda.is_available():
        raise SpecError(
            subject,
            "needs an NVIDIA GPU, and PyTorch finds none",
            "set builder: rtx, which builds on any machine, or run on a machine with the GPU",
        )
    try:
        return import_module(builder.package)
    except (ImportError, OSError) as error:
        problem = f"needs {builder.distribution}, which does not import ({error})"
        raise SpecError(subject, problem, f"reinstall it: {remedy}") from error


def known_capabilities(package: ModuleType) -> tuple[str, ...]:
    """Return the compute capabilities that can be named as targets; none where only the GPU counts.

    They come from the package: ``SM86`` is 8.6.
    """
    members = getattr(package, "ComputeCapability", None)
    names = () if members is None else tuple(members.__members__)
    numbers = [name.removeprefix("SM") for name in names if name.startswith("SM")]
    return tuple(f"{number[:-1]}.{number[-1]}" for number in numbers)


def versions(name: BuilderName) -> dict[str, str]:
    """Return what an engine depends on: the package, and the GPU where it is built for that."""
    builder = BUILDERS[name]
    try:
        used = {builder.distribution: version(builder.distribution)}
    except PackageNotFoundError:  # it is found by another name, or not at all: see loaded()
        used = {builder.distribution: ""}
    if builder.needs_gpu and torch.cuda.is_available():
        used["gpu"] = torch.cuda.get_device_name()
    return used


def own_capability() -> str:
    """Return the compute capability of the first GPU, such as ``8.6``."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def cannot_run(name: BuilderName, targets: Sequence[str]) -> str:
    """Return why an engine cannot be run on this machine; empty where it can.

    Args:
        targets: the compute capabilities that it is built for; none where that is open.
    """
    if not torch.cuda.is_available():
        return _NO_GPU
    here = own_capability()
    if name == "rtx" and targets and here not in targets:
        return f"the engine is for compute capability {', '.join(targets)}, the GPU here has {here}"
    return ""
