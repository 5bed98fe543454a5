"""Takes one case through all cells, as a user would: with a spec, and the command's exit codes."""

from __future__ import annotations

import gc
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner

import compressor
from compressor.cli.application import application
from compressor.models.transformers.classes import auto_class_for
from compressor.progress import quiet_libraries
from compressor.run.timing import timing
from compressor.types.tensors import Array, Batch, TensorSpec, fixed_batch, unstackable
from tests.zoo import models, peers
from tests.zoo.cases import LENGTHS, Case, drawn
from tests.zoo.compare import error_db, named_outputs, opened, outputs_of, rounded_tensors
from tests.zoo.judge import PEERS

_CALIBRATION, _EVALUATION, _COMPARED = 8, 4, 4
_STEPS = 4  # of a sequence, for a file with a state
BOTH = ({"format": "safetensors"}, {"format": "onnx"})
ONNX = ({"format": "onnx"},)
FUSE, STATIC, DYNAMIC = {"pass": "fuse"}, {"pass": "quantize-static"}, {"pass": "quantize-dynamic"}
Outcome = dict[str, Any]
# For a cell, also on a slow machine. Peers that end in a result take at most 20.
_CPU_SECONDS, _PEER_SECONDS = 400, 30


class Work:
    """A case with its files, and what its source computes.

    Attributes:
        folder: an empty one.
        inputs: of the model.
        batch: what is compared on.
        wanted: the source's outputs, in order.
    """

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder
        self.like = str(case.options.get("like", "")) if case.kind == "file" else ""
        self.inputs: tuple[TensorSpec, ...] = case.inputs
        folder.mkdir(parents=True, exist_ok=True)
        model, run = {"network": self._network, "directory": self._directory, "file": self._file}[
            case.kind
        ]()
        self.feeds = bool(case.state) or unstackable(self.inputs) is not None
        self.size = fixed_batch(self.inputs) or _COMPARED
        # A file's own batch may be too small for an error that differs from sample to sample.
        self.batch = self.drawn(int(case.options.get("compared", self.size)), seed=7)
        self.spec: dict[str, Any] = {
            "version": 1,
            "name": "case",
            "model": model,
            "data": {
                role: self._data(role, count, seed)
                for role, count, seed in (
                    ("calibration", _CALIBRATION, 5),
                    ("evaluation", _EVALUATION, 6),
                )
            },
            "limits": {"size-ratio": None, "latency-ratio": None, "metric-drop": None},
            "output": "out",
        }
        self.wanted = run(self.batch)
        assert all(np.isfinite(a).all() for a in self.wanted if a.dtype.kind == "f")

    def _network(self) -> tuple[dict[str, Any], Callable[[Batch], list[Array]]]:
        config = {
            "library": self.case.library,
            "model": self.case.model,
            "options": dict(self.case.options),
            "inputs": [[i.name, list(i.shape), i.dtype] for i in self.inputs],
        }
        model = {
            "factory": "tests.zoo.models:build",
            "config": config,
            "inputs": self._declared(),
        }
        self.module = models.build(**config)
        return model, lambda batch: outputs_of(self.module, batch)

    def _directory(self) -> tuple[dict[str, Any], Callable[[Batch], list[Array]]]:
        import transformers

        directory = models.save_directory(self.case, self.folder / "directory")
        (name,) = json.loads((directory / "config.json").read_text())["architectures"]
        model = {
            "factory": f"transformers.{auto_class_for(name)}",
            "checkpoint": "directory",
            "inputs": self._declared(),
        }
        with quiet_libraries():
            self.module = getattr(transformers, name).from_pretrained(directory).eval()
        return model, lambda batch: named_outputs(self.module, batch)

    def _file(self) -> tuple[dict[str, Any], Callable[[Batch], list[Array]]]:
        path = models.save_file(self.case, self.folder / "source.onnx")
        given: Mapping[str, list[int]] = self.case.options.get("shapes", {})
        session = opened(path)
        self.inputs = tuple(
            TensorSpec(i.name, tuple(given.get(i.name, i.shape)), _DTYPES[i.type])
            for i in session.get_inputs()
        )
        return {"onnx": "source.onnx"}, lambda batch: session.run(None, batch)

    def _declared(self) -> dict[str, Any]:
        return {i.name: {"shape": list(i.shape), "dtype": i.dtype} for i in self.inputs}

    def fix_axes(self) -> bool:
        """Give all axes but that of samples a number, as the refusal says; return if one had none.

        The lengths are those that are drawn anyway.
        """
        fixed = tuple(
            replace(i, shape=(i.shape[0], *(LENGTHS.get(str(d), d) for d in i.shape[1:])))
            for i in self.inputs
        )
        changed = fixed != self.inputs
        self.inputs = fixed
        self.spec["model"]["inputs"] = self._declared()
        return changed

    def drawn(self, count: int, seed: int) -> Batch:
        inputs = self.inputs
        if count != self.size:
            inputs = tuple(replace(i, shape=("batch", *i.shape[1:])) for i in inputs)
        batch = drawn(inputs, count, seed, self.like)
        for spec in self.inputs:
            if spec.name in self.case.state:
                batch[spec.name] = np.zeros_like(batch[spec.name])
            elif spec.name == "sr":
                batch[spec.name] = np.full_like(batch[spec.name], 16000)
        return batch

    def _data(self, role: str, count: int, seed: int) -> dict[str, Any]:
        if not self.feeds:
            inputs = [TensorSpec(i.name, ("batch", *i.shape[1:]), i.dtype) for i in self.inputs]
            np.savez(self.folder / f"{role}.npz", **drawn(tuple(inputs), count, seed, self.like))
            return {"npz": f"{role}.npz", "batch": self.size}
        (self.folder / role).mkdir(exist_ok=True)
        for number in range(_STEPS):
            steps = [
                self.drawn(self.size, seed + 10 * (_STEPS * number + s)) for s in range(_STEPS)
            ]
            feed = steps[0]
            if self.case.state:
                feed = {
                    name: np.stack([step[name] for step in steps]) if array.ndim else array
                    for name, array in feed.items()
                    if name not in self.case.state
                }
            np.savez(self.folder / role / f"{number}.npz", **feed)
        data: dict[str, Any] = {"npz": role, "samples": "feeds"}
        return {**data, "state": dict(self.case.state)} if self.case.state else data

    def typed(
        self, command: str, passes: Sequence[Any], exports: Sequence[Any], judged: bool = False
    ) -> Outcome:
        """Write a spec and give it to a command; with data to evaluate on only if asked for."""
        spec = {**self.spec, "passes": list(passes), "exports": list(exports)}
        if not judged:
            spec["data"] = {k: v for k, v in spec["data"].items() if k != "evaluation"}
        path = self.folder / "spec.yaml"
        path.write_text(json.dumps(spec), encoding="utf-8")
        with _hurried():
            outcome = command_outcome(command, str(path))
        return {**outcome, "message": outcome["message"].replace(f"{path}:1: ", "")}

    def artifact(self) -> list[Array]:
        """Return the outputs of the ONNX file that the last run wrote."""
        result: list[Array] = opened(self.folder / "out" / "model.onnx").run(None, self.batch)
        return result

    def reloaded(self) -> list[Array]:
        """Return those of the other artifact."""
        module = compressor.load(self.folder / "out")
        with torch.inference_mode():
            named = module(**{k: torch.from_numpy(v) for k, v in self.batch.items()})
        return [t.detach().numpy() for t in named.values()]


@contextmanager
def _hurried() -> Iterator[None]:
    """Let runs time their artifacts once: the zoo asks for no latency, but of ``latency``."""
    once = {"_BUDGET": 0.0, "_LEAST_OPENINGS": 1, "_LONG": inf, "_WARM_UP": 0.0}
    before = {name: getattr(timing, name) for name in once}
    vars(timing).update(once)
    try:
        yield
    finally:
        vars(timing).update(before)


_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}


def command_outcome(*arguments: str) -> Outcome:
    """Run a command; return its exit code and the last lines of what it says if that is not 0."""
    done = CliRunner().invoke(application, list(arguments))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "internal error:"))] or lines[-3:]
    return {"code": done.exit_code, "message": " | ".join(said)[:600] if done.exit_code else ""}


def plan(work: Work) -> Outcome:
    return work.typed("plan", (FUSE, STATIC), BOTH)


def export(work: Work) -> Outcome:
    outcome = work.typed("run", (), BOTH)
    if not outcome["code"]:
        outcome["db"] = error_db(work.wanted, work.artifact())
        shutil.copy(work.folder / "out" / "model.onnx", work.folder / "float.onnx")
    return outcome


def reload(work: Work) -> Outcome:
    """Open the other artifact of the run before."""
    if not (work.folder / "out" / "model.json").exists():
        return {"skipped": "there is no export to reload"}
    return {"code": 0, "message": "", "db": error_db(work.wanted, work.reloaded())}


def fuse(work: Work) -> Outcome:
    outcome = work.typed("run", (FUSE,), ONNX)
    if not outcome["code"]:
        outcome["db"] = error_db(work.wanted, work.artifact())
    return outcome


def static(work: Work) -> Outcome:
    outcome = work.typed("run", (FUSE, STATIC), BOTH, judged=work.case.kind == "file")
    return outcome if outcome["code"] else {**outcome, **_rounded(work), **_both(work)}


def dynamic(work: Work) -> Outcome:
    """Quantize with no data, and convolutions too where there is nothing else."""
    outcome = work.typed("run", (FUSE, DYNAMIC), ONNX)
    if "option convolutions is off" in outcome["message"]:
        outcome = work.typed("run", (FUSE, {**DYNAMIC, "convolutions": True}), ONNX)
    return outcome if outcome["code"] else {**outcome, **_rounded(work)}


def _rounded(work: Work) -> Outcome:
    path = work.folder / "out" / "model.onnx"
    return {
        "db": error_db(work.wanted, work.artifact()),
        "rounded": rounded_tensors(path),
        "bytes": path.stat().st_size,
    }


def _both(work: Work) -> Outcome:
    return {"reload_db": error_db(work.artifact(), work.reloaded())}


def prune(work: Work) -> Outcome:
    """Prune to half, or to what the refusal says can be reached."""
    target = 0.5
    outcome = _pruned(work, target)
    reachable = re.search(r"set it to ([0-9.]+) or more", outcome["message"])
    if outcome["code"] == 2 and reachable:
        target = float(reachable[1])
        outcome = _pruned(work, target)
    if outcome["code"]:
        return outcome
    report = json.loads((work.folder / "out" / "report.json").read_text(encoding="utf-8"))
    sizes = [a["bytes"] / a["float_bytes"] for a in report["artifacts"] if a["format"] == "onnx"]
    return {**outcome, **_both(work), "target": target, "size": round(sizes[0], 3)}


def _pruned(work: Work, target: float) -> Outcome:
    return work.typed("run", ({"pass": "prune-structured", "target": {"macs": target}},), BOTH)


def directory(work: Work) -> Outcome:
    """Quantize the directory's weights for ``transformers``, and compare what it computes."""
    output = work.folder / "quantized"
    source = str(work.folder / "directory")
    outcome = command_outcome("quantize", source, "-o", str(output), "--preset", "int8")
    if outcome["code"]:
        return outcome
    with quiet_libraries():
        written = type(work.module).from_pretrained(output).eval()
    return {**outcome, "db": error_db(work.wanted, named_outputs(written, work.batch))}


def latency(work: Work) -> Outcome:
    """Time the file as it was and its int8 form in turn, by their time on the processor."""
    from compressor.lab.bench.bench import in_turn
    from compressor.lab.bench.finding import find_artifacts
    from compressor.run.artifact_file import Machinery

    files = [work.folder / "source.onnx"]
    outcome = work.typed("run", (FUSE, STATIC), ONNX)
    if outcome["code"]:
        return outcome
    files.append(work.folder / "out" / "model.onnx")
    found = find_artifacts(files)
    times = in_turn({a.name: a for a in found}, Machinery(), [work.batch], _SECONDS, 0.02)
    return {**outcome, "ratio": times.ratio(found[1].name, found[0].name)}


_SECONDS = 1.5


def ort_static(work: Work) -> Outcome:
    return peers.quantized(work, "static")


def ort_dynamic(work: Work) -> Outcome:
    return peers.quantized(work, "dynamic")


def torch_pruning(work: Work) -> Outcome:
    return peers.pruned(work)


LOWERED = (plan, export, fuse, static, dynamic, prune)
COMMON = (plan, export, reload, fuse, static, dynamic, prune)
CELLS: Mapping[str, tuple[Callable[[Work], Outcome], ...]] = {
    "network": (*COMMON, ort_static, ort_dynamic, torch_pruning),
    "directory": (*COMMON, directory, ort_static, ort_dynamic),
    "file": (*COMMON, latency, ort_static, ort_dynamic),
}


def take(case: Case, folder: Path, skip: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the name of each cell before it begins, and then what came of it."""
    yield {"begins": "source"}
    try:
        work = Work(case, folder)
    except Exception as error:  # noqa: BLE001 - libraries raise anything
        yield {"cell": "source", "failed": _shown(error)}
        return
    yield {"cell": "source"}
    signal.signal(signal.SIGPROF, _out_of_time)
    unlowered: Outcome = {}
    for function in CELLS[case.kind]:
        if function.__name__ in skip:
            continue
        yield {"begins": function.__name__}
        begun = time.process_time()
        peer = function.__name__ in PEERS
        signal.setitimer(signal.ITIMER_PROF, _PEER_SECONDS if peer else _CPU_SECONDS)
        gc.collect()
        gc.freeze()  # what is there stays: runs look for garbage often, and need not visit it
        try:
            outcome = unlowered if unlowered and function in LOWERED else function(work)
            if function is plan and "needs its number" in outcome["message"] and work.fix_axes():
                outcome = {**function(work), "fixed": True}
            if "cannot be lowered" in outcome.get("message", ""):
                unlowered = outcome
        except Exception as error:  # noqa: BLE001 - a traceback is a result
            outcome = {"failed": _shown(error)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = round(time.process_time() - begun, 1)
        yield {"cell": function.__name__, **outcome, "seconds": seconds}


def _out_of_time(*_: Any) -> None:
    raise TimeoutError("more seconds than a cell may take")


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]
