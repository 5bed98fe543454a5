"""Find out what this machine can do."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = (
    "compressor",
    "torch",
    "onnx",
    "onnx-ir",
    "numpy",
    "safetensors",
    "tensorrt",
    "tensorrt-rtx",
    "transformers",
    "accelerate",
)
_RUNTIMES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
)
_OF_DEVELOPERS = frozenset({"dev", "docs", "mutants", "test"})
_REQUIREMENT = re.compile(r'([\w.-]+).*extra == "([\w-]+)"')
_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)

# Processor features that matter for int8, the best first, and what they mean.
_AMX = "int8 is much faster than float32 here: AMX multiplies whole int8 tiles"
_DOT = "int8 is faster than float32 here: one instruction multiplies and adds int8 values"
_VNNI = f"{_DOT} (VNNI)"
_WIDE = (
    "int8 takes 0.5 to 0.7 of float32's time here: without VNNI an int8 product takes three "
    "instructions, and its sums saturate unless weights avoid that (overflow: avoid, the default)"
)
_INT8: Mapping[str, str] = {
    "amx_int8": _AMX,
    "avx512_vnni": _VNNI,
    "avx_vnni": _VNNI,
    "i8mm": _DOT,
    "asimddp": _DOT,
    "avx512bw": _WIDE,
    "avx2": _WIDE,
}
_UNKNOWN = "what int8 gains here is not known: measure it with compress run"


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees.

    Attributes:
        compute_capability: such as ``8.6``.
    """

    name: str
    compute_capability: str
    memory: int


@dataclass(frozen=True)
class Builder:
    """A TensorRT builder.

    Attributes:
        available: it can build engines here.
        detail: its version, or what is missing.
    """

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        system: operating system and architecture.
        versions: of the packages that matter; ``None`` where one is not installed.
        runtimes: distributions of ONNX Runtime that are installed, with their versions.
        providers: what ONNX Runtime was built with; a GPU's need the GPU and its driver too.
        cores: how many this process may use.
        memory: bytes that this process may use.
        disk_free: free bytes in the current folder.
        extras: for each extra of this package that lacks something, what it lacks.
        features: features of the processor that matter for int8, the best first.
        warnings: what should be fixed.
    """

    python: str
    system: str
    versions: Mapping[str, str | None]
    runtimes: Mapping[str, str]
    providers: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    builders: tuple[Builder, ...]
    cores: int
    memory: int | None
    disk_free: int
    extras: Mapping[str, tuple[str, ...]]
    features: tuple[str, ...]
    int8: str
    warnings: tuple[str, ...]


def examine() -> Machine:
    """Examine this machine; imports PyTorch and ONNX Runtime."""
    gpus = _gpus()
    runtimes = {name: number for name in _RUNTIMES if (number := _version(name)) is not None}
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.is_file() else ""
    features = int8_features(text)
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={name: _version(name) for name in _PACKAGES},
        runtimes=runtimes,
        providers=_providers(),
        gpus=gpus,
        builders=(_rtx_builder(), _gpu_builder(gpus)),
        cores=usable_cores(),
        memory=_memory(),
        disk_free=shutil.disk_usage(Path.cwd()).free,
        extras=missing_extras(requires("compressor") or ()),
        features=features,
        int8=int8_meaning(features),
        warnings=tuple(runtime_warnings(tuple(runtimes))),
    )


def missing_extras(requirements: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the extras that lack packages, and which they lack.

    Args:
        requirements: as a package's metadata has them, such as ``gguf>=0.19; extra == "gguf"``.
    """
    missing: dict[str, tuple[str, ...]] = {}
    for requirement in requirements:
        found = _REQUIREMENT.match(requirement)
        if found is None or found[1] == "compressor" or found[2] in _OF_DEVELOPERS:
            continue
        elsewhere = "platform_machine" in requirement and platform.machine() not in requirement
        if not elsewhere and _version(found[1]) is None:
            missing[found[2]] = (*missing.get(found[2], ()), found[1])
    return missing


def int8_features(cpu_info: str) -> tuple[str, ...]:
    """Return the features that matter for int8, the best first.

    Args:
        cpu_info: what Linux says of its processors; other systems say nothing.
    """
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            present = set(value.split())
            return tuple(name for name in _INT8 if name in present)
    return ()


def int8_meaning(features: Sequence[str]) -> str:
    """Return in a sentence what the features mean for int8 models."""
    return _INT8[features[0]] if features else _UNKNOWN


def runtime_warnings(runtimes: Sequence[str]) -> list[str]:
    """Return what is wrong with the installed distributions of ONNX Runtime."""
    if not runtimes:
        return ["ONNX Runtime is not installed: pip install onnxruntime"]
    if len(runtimes) > 1:
        return [
            f"{' and '.join(runtimes)} are installed together and overwrite each other's files: "
            f"pip uninstall {' '.join(runtimes)}, then install one of them again"
        ]
    return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _providers() -> tuple[str, ...]:
    if find_spec("onnxruntime") is None:
        return ()
    import onnxruntime

    return tuple(onnxruntime.get_available_providers())


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, f"{p.major}.{p.minor}", p.total_memory) for p in gpus)


def _rtx_builder() -> Builder:
    if find_spec("tensorrt_rtx") is None:
        return Builder("rtx", available=False, detail="pip install tensorrt-rtx")
    return Builder("rtx", available=True, detail=f"tensorrt-rtx {_version('tensorrt-rtx')}")


def _gpu_builder(gpus: Sequence[Gpu]) -> Builder:
    if find_spec("tensorrt") is None:
        detail = "pip install tensorrt, from NVIDIA's package index"
        return Builder("gpu", available=False, detail=detail)
    if not gpus:
        return Builder("gpu", available=False, detail="needs an NVIDIA GPU, and there is none")
    return Builder("gpu", available=True, detail=f"tensorrt {_version('tensorrt')}")


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    """Return the machine's memory, or this container's limit where that is less."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _MEMORY_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            memory = min(memory, int(text))
    return memory
