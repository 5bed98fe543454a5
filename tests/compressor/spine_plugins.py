"""Passes and exporters that do what tests of the spine need, and exporters that lie."""

# ruff: noqa: ARG002

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.passes import GraphPass, LayerOutcome, LayerPlan, Outcome, PassContext, Survey
from compressor.types.tensors import Batch
from tests.compressor.tiny_project import Project
from tests.paths import ROOT

DEADLY = "SPINE_TEST_DEADLY"
HERE = "tests.compressor.spine_plugins"
PASSES = {
    "nudge": f"{HERE}:Nudge",
    "strike": f"{HERE}:Strike",
    "learn": f"{HERE}:Learn",
    "drill": "tests.compressor.drill:Drill",
}
EXPORTERS = {
    "liar": f"{HERE}:LyingExporter",
    "cut": f"{HERE}:CuttingExporter",
    "empty": f"{HERE}:EmptyExporter",
    "slow": f"{HERE}:SlowExporter",
}


class Nudge(GraphPass):
    """Multiplies every layer's weight; a pass that works on weights alone."""

    name: ClassVar[str] = "nudge"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})

    factor: float = Field(default=1.0, description="what weights are multiplied with")

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        return Survey(tuple(LayerPlan(layer.name, "scale") for layer in carrier.layers()))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        layers = carrier.layers()
        changes = {layer.weight: carrier.weight(layer) * self.factor for layer in layers}
        return Outcome(
            carrier.with_weights(changes),
            tuple(LayerOutcome(layer.name, f"x {self.factor}") for layer in layers),
        )


class Strike(Nudge):
    """Sends its own process a signal, if the environment says which."""

    name: ClassVar[str] = "strike"

    when: Literal["apply", "save"] = Field(
        default="apply", description="while it computes, or while its result is stored"
    )

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        outcome = super().apply(carrier, context, statistics)
        if self.when == "save":
            return replace(outcome, carrier=_Doomed(outcome.carrier.graph()))
        strike()
        return outcome

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        return carrier


class _Doomed(OnnxCarrier):
    """Strikes when half of it is written."""

    def save(self, directory: Path) -> None:
        (directory / "graph.onnx").write_bytes(b"half")
        strike()
        super().save(directory)


def strike() -> None:
    if DEADLY in os.environ:
        os.kill(os.getpid(), signal.Signals[os.environ[DEADLY]])


class Learn(Nudge):
    """Stands for a pass that trains."""

    name: ClassVar[str] = "learn"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.TRAIN})


class _Altered:
    """A runner whose outputs are changed on the way."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.runtime = runner.runtime

    def run(self, batch: Batch) -> Batch:
        return {name: self.change(array) for name, array in self._runner.run(batch).items()}

    def change(self, array: Any) -> Any:
        return array


class _Louder(_Altered):
    def change(self, array: Any) -> Any:
        return array + array.std() + 1


class _Shorter(_Altered):
    def change(self, array: Any) -> Any:
        return array[..., :-1]


class _Empty(_Altered):
    def change(self, array: Any) -> Any:
        return array * np.where(np.arange(len(array)) == 1, np.nan, 1)[:, None].astype(array.dtype)


class _Slower(_Altered):
    seconds = 0.01  # ten times what brief_timing plays for the float model


class LyingExporter(OnnxExporter):
    """Its artifact gives other values than the model."""

    format: ClassVar[str] = "liar"

    def open(self, path: Path) -> Any:
        return _Louder(super().open(path))


class CuttingExporter(OnnxExporter):
    """Its artifact gives outputs of another shape."""

    format: ClassVar[str] = "cut"

    def open(self, path: Path) -> Any:
        return _Shorter(super().open(path))


class EmptyExporter(OnnxExporter):
    """Its artifact gives NaN for the second sample."""

    format: ClassVar[str] = "empty"

    def open(self, path: Path) -> Any:
        return _Empty(super().open(path))


class SlowExporter(OnnxExporter):
    """Its artifact takes its time."""

    format: ClassVar[str] = "slow"

    def open(self, path: Path) -> Any:
        return _Slower(super().open(path))


def in_another_process(
    project: Project, site: Path, *command: str, deadly: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python beside a project's spec; the passes are those of a third party's distribution.

    Args:
        project: its folder is the working directory.
        site: a new folder for the distribution.
        command: arguments for Python.
        deadly: the signal that ``strike`` sends.
    """
    info = site / "spine_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spine-plugins\nVersion: 1.0\n")
    entries = "".join(f"{name} = {reference}\n" for name, reference in PASSES.items())
    (info / "entry_points.txt").write_text(f"[compressor.passes]\n{entries}")
    root = ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(root)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-B", *command],
        cwd=project.path.parent,
        env={**environment, DEADLY: deadly} if deadly else environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
