"""The two builders of engines: packages with one Python interface, and what sets them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch

from compressor.errors import SpecError

BuilderName = Literal["rtx", "gpu"]
_NO_GPU = "TensorRT engines run on NVIDIA GPUs only, and this machine has none"


@dataclass(frozen=True)
class Builder:
    """One of the packages.

    Attributes:
        name: its name in a spec.
        package: the Python module.
        distribution: what pip installs.
        source: where pip finds it.
        needs_gpu: it builds on a machine with an NVIDIA GPU only, and for that GPU.
    """

    name: BuilderName
    package: str
    distribution: str
    source: str
    needs_gpu: bool


BUILDERS: dict[BuilderName, Builder] = {
    "rtx": Builder("rtx", "tensorrt_rtx", "tensorrt-rtx", "", needs_gpu=False),
    "gpu": Builder("gpu", "tensorrt", "tensorrt", ", from NVIDIA's package index", needs_gpu=True),
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
            "set builder: rtx, which builds on any machine, or run it where the GPU is",
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
    found = getattr(package, "ComputeCapability", None)
    names = () if found is None else tuple(found.__members__)
    numbers = [name.removeprefix("SM") for name in names if name.startswith("SM")]
    return tuple(f"{number[:-1]}.{number[-1]}" for number in numbers)


def versions(name: BuilderName) -> dict[str, str]:
    """Return what an engine depends on: the package, and the GPU where it is built for that."""
    builder = BUILDERS[name]
    try:
        found = {builder.distribution: version(builder.distribution)}
    except PackageNotFoundError:  # it is found by another name, or not at all: see loaded()
        found = {builder.distribution: ""}
    if builder.needs_gpu and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def targets(name: BuilderName, named: Sequence[str]) -> tuple[str, ...]:
    """Return the compute capabilities that are known to be built for, if any are."""
    return (own_capability(),) if BUILDERS[name].needs_gpu else tuple(named)


def own_capability() -> str:
    """Return the compute capability of the first GPU, such as ``8.6``."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def cannot_run(name: BuilderName, targets: Sequence[str]) -> str:
    """Say why an engine cannot be run on this machine; empty where it can.

    Args:
        name: its builder.
        targets: the compute capabilities that it is built for; none where that is open.
    """
    if not torch.cuda.is_available():
        return _NO_GPU
    own = own_capability()
    if name == "rtx" and targets and own not in targets:
        return f"the engine is for compute capability {', '.join(targets)}, the GPU here has {own}"
    return ""
