"""Builds one engine, as a process of its own that imports nothing but TensorRT.

TensorRT's logger is one for all of a process, an abort in native code ends a process, and where
shapes are dynamic, TensorRT-RTX names internal values in an order that comes from memory addresses.
So a build has its own process, with a fixed environment and without randomized addresses, where the
system allows that: the same request then gives the same bytes.

It reads ``request.json`` in its working folder and writes ``answer.json``, and with it
``model.engine``. :mod:`compressor.exporters.tensorrt.building` is the other side.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

REQUEST, ANSWER = "request.json", "answer.json"
ENGINE, CACHE = "model.engine", "timing.cache"
_FIXED = "--fixed-addresses"
_NO_RANDOMIZE = 0x0040000  # ADDR_NO_RANDOMIZE of <linux/personality.h>
_REPORT = "Layers:"


def main() -> None:
    """Answer the request; start again without randomized addresses first."""
    if _FIXED not in sys.argv:
        if sys.platform == "linux":
            ctypes.CDLL(None).personality(_NO_RANDOMIZE)  # a refusal is not an error
        os.execv(sys.executable, [*sys.orig_argv, _FIXED])
    request = json.loads(Path(REQUEST).read_text(encoding="utf-8"))
    sys.path.insert(0, request["folder"])
    answer = answered(import_module(request["package"]), request)
    Path(ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def answered(package: ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """Build what a request asks for.

    Returns:
        ``layers``, the report of a built engine's layers; or ``refused``, a node with ``node``,
        ``operator``, ``known`` and ``reason``; or ``unknown``, an option that this version does
        not have; or ``failed``, a reason.
    """
    heard = messages(package)
    builder = package.Builder(heard)
    network = builder.create_network(_network_flags(package))
    parser = package.OnnxParser(network, heard)
    if "operators" in request:
        names = request["operators"]
        return {"lacking": [name for name in names if not parser.supports_operator(name)]}
    if not parser.parse_from_file(request["model"]):
        return {"refused": _refused(parser, heard)}
    config = builder.create_builder_config()
    config.profiling_verbosity = package.ProfilingVerbosity.DETAILED
    wrong = _configure(package, builder, config, request)
    if wrong:
        return wrong
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return {"failed": heard.error}
    Path(ENGINE).write_bytes(plan)
    if request["timing_cache"]:
        Path(CACHE).write_bytes(config.get_timing_cache().serialize())
    return {"layers": heard.layers or _inspected(package, heard, plan)}


def messages(package: ModuleType) -> Any:
    """Return a logger for TensorRT that keeps the first error and the report of layers."""
    severity = package.ILogger.Severity

    class Messages(package.ILogger):  # type: ignore[misc,name-defined]  # its base is an argument
        """Silent; TensorRT uses the first one that a process gives it."""

        def __init__(self) -> None:
            package.ILogger.__init__(self)
            self.error = ""
            self.layers = ""

        def log(self, level: Any, message: str) -> None:
            """Take a message; TensorRT calls it."""
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                self.error = self.error or " ".join(message.split())
            elif message.lstrip().startswith(_REPORT):
                self.layers = message

    return Messages()


def _network_flags(package: ModuleType) -> int:
    """Strong typing, which is the only kind in newer versions: those may not have the flag."""
    flag = getattr(package.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _refused(parser: Any, heard: Any) -> dict[str, Any]:
    if not parser.num_errors:
        return {"node": "", "operator": "", "known": True, "reason": heard.error}
    error = parser.get_error(0)
    operator = error.node_operator()
    return {
        "node": error.node_name(),
        "operator": operator,
        "known": parser.supports_operator(operator),
        "reason": " ".join(error.desc().split()),
    }


def _configure(
    package: ModuleType, builder: Any, config: Any, request: dict[str, Any]
) -> dict[str, Any]:
    """Set all that a request asks for; return what is wrong with it, if anything is."""
    capabilities = request["capabilities"]
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for index, name in enumerate(capabilities):
            config.set_compute_capability(getattr(package.ComputeCapability, name), index)
    for name in request["flags"]:
        if not hasattr(package.BuilderFlag, name):
            return {"unknown": name}
        config.set_flag(getattr(package.BuilderFlag, name))
    level = request["hardware"]
    if level:
        if not hasattr(package.HardwareCompatibilityLevel, level):
            return {"unknown": level}
        config.hardware_compatibility_level = getattr(package.HardwareCompatibilityLevel, level)
    if request["timing_cache"]:
        known = Path(CACHE).read_bytes() if Path(CACHE).is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(known), False):
            return {"stale": True}
    if request["profiles"]:
        profile = builder.create_optimization_profile()
        for name, shapes in request["profiles"].items():
            profile.set_shape(name, *(tuple(shape) for shape in shapes))
        config.add_optimization_profile(profile)
    return {}


def _inspected(package: ModuleType, heard: Any, plan: Any) -> str:
    """Return the report from the engine itself, which a GPU can open."""
    engine = package.Runtime(heard).deserialize_cuda_engine(plan)
    if engine is None:
        return ""
    inspector = engine.create_engine_inspector()
    found: str = inspector.get_engine_information(package.LayerInformationFormat.ONELINE)
    return found


if __name__ == "__main__":
    main()
