"""Build an engine in a process of its own, and say what is wrong where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compressor.errors import ArtifactError, CompressorError, SpecError
from compressor.exporters.tensorrt import build_process
from compressor.exporters.tensorrt.profiles import Profile

_KEPT = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_SHOWN = 400
_LEAVE_OUT = "write that part of the model with other operators, or leave out the export tensorrt"


@dataclass(frozen=True)
class Settings:
    """What an engine is built with.

    Attributes:
        package: TensorRT's Python package.
        capabilities: compute capabilities; none leaves the choice to the builder.
        profiles: the shapes of inputs with dynamic dimensions.
        flags: names of builder flags.
        hardware: name of a hardware compatibility level; empty for the GPU at hand.
        timing_cache: what earlier builds measured; ``None`` without a cache.
    """

    package: str
    capabilities: tuple[str, ...] = ()
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    hardware: str = ""
    timing_cache: bytes | None = None


@dataclass(frozen=True)
class Engine:
    """A built engine.

    Attributes:
        plan: its bytes.
        layers: the builder's report of its layers, as it words it.
        timing_cache: what was measured, with what was known before; ``None`` without a cache.
    """

    plan: bytes
    layers: str
    timing_cache: bytes | None


def build(model: Path, settings: Settings) -> Engine:
    """Build an engine.

    Args:
        model: an ONNX file in a folder of its own, which is the process's working folder.
        settings: how.

    Raises:
        SpecError: the parser does not take the model, or this version a setting.
        ArtifactError: the builder gives no engine, or does not say of what it consists.
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
            "report it, with the version",
        )
    cache = None
    if settings.timing_cache is not None:
        cache = (folder / build_process.CACHE).read_bytes()
    return Engine((folder / build_process.ENGINE).read_bytes(), answer["layers"], cache)


def unsupported(folder: Path, package: str, operators: Sequence[str]) -> frozenset[str]:
    """Return those operators that the parser does not know.

    Args:
        folder: an empty one, for the process.
        package: TensorRT's Python package.
        operators: their names.
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
    """Run the process on a request; return its answer.

    Raises:
        ArtifactError: it ends without one.
    """
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
        said = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
        raise ArtifactError(
            f"package {package!r}",
            f"ended with code {done.returncode} before it answered ({said[:_SHOWN]})",
            "free memory, or space for temporary files, if it lacked some; otherwise report it, "
            "with the spec",
        )
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def _error(answer: Mapping[str, Any], settings: Settings) -> CompressorError:
    """Turn what the process says into an error with a remedy."""
    if "refused" in answer:
        return _refusal(**answer["refused"])
    if "unknown" in answer:
        return SpecError(
            f"export tensorrt: {answer['unknown'].lower().replace('_', '-')}",
            f"is not known to the installed version of {settings.package}",
            "leave it out, or install another version",
        )
    if "stale" in answer:
        return SpecError(
            "timing-cache",
            "is of another version of TensorRT or another GPU",
            "name another file, or remove that one",
        )
    targets = ", ".join(settings.capabilities)
    return ArtifactError(
        f"package {settings.package!r}",
        f"builds no engine{f' for {targets}' if targets else ''} "
        f"({answer['failed'][:_SHOWN] or 'it gives no reason'})",
        "change what it names, choose other targets, or leave out the export tensorrt",
    )


def _refusal(node: str, operator: str, known: bool, reason: str) -> SpecError:
    if not known:
        return unknown_operator(node, operator)
    return SpecError(
        f"node {node!r} ({operator})" if operator else "the graph",
        f"is refused by TensorRT's ONNX parser ({reason[:_SHOWN]})",
        _LEAVE_OUT,
    )
