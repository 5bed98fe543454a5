"""Ahead-of-time model compression and export: one spec in, proven artifacts out."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.errors import CompressorError
    from compressor.front.compress import prune, quantize
    from compressor.front.run import run
    from compressor.front.spec import Spec
    from compressor.front.training import PreparedModule, convert, prepare
    from compressor.models.codec.load import load
    from compressor.report.result import RunResult
    from compressor.run.options import RunOptions
    from compressor.spec.keys import LimitKeys, MetricKeys, ModelKeys
    from compressor.types.training import TrainingStep

__all__ = [
    "CompressorError",
    "LimitKeys",
    "MetricKeys",
    "ModelKeys",
    "PreparedModule",
    "RunOptions",
    "RunResult",
    "Spec",
    "TrainingStep",
    "__version__",
    "convert",
    "load",
    "prepare",
    "prune",
    "quantize",
    "run",
]

__version__ = "0.1.0"

_FROM = {
    "CompressorError": "errors",
    "LimitKeys": "spec.keys",
    "MetricKeys": "spec.keys",
    "ModelKeys": "spec.keys",
    "PreparedModule": "front.training",
    "RunOptions": "run.options",
    "RunResult": "report.result",
    "Spec": "front.spec",
    "TrainingStep": "types.training",
    "convert": "front.training",
    "load": "models.codec.load",
    "prepare": "front.training",
    "prune": "front.compress",
    "quantize": "front.compress",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``import compressor`` alone must stay instant."""
    if name not in _FROM:
        raise AttributeError(f"module 'compressor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"compressor.{_FROM[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """This module, whose ``run`` is the function, though a folder in it has that name, too."""

    @property
    def run(self) -> Any:
        from compressor.front.run import run

        return run

    @run.setter
    def run(self, folder: ModuleType) -> None:
        """Leave the folder, which an import would put here, to ``sys.modules`` alone."""


sys.modules[__name__].__class__ = _Package
