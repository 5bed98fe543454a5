"""Energy of inferences, from counters of the processor or the GPU where they can be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from compressor.types.carrier import Runner
from compressor.types.tensors import Batch

POWERCAP = Path("/sys/class/powercap")
_ROUNDS = 5
_SECONDS = 1.0


@dataclass(frozen=True)
class Counter:
    """Something that counts energy.

    Attributes:
        joules: reads it.
        wraps: joules after which it wraps around; infinite if it does not.
    """

    source: str
    joules: Callable[[], float]
    wraps: float = float("inf")


def energy_counters(provider: str, folder: Path = POWERCAP) -> tuple[tuple[Counter, ...], str]:
    """Return the energy counters of the device, or the reason why there are none.

    Args:
        provider: ``cpu`` for the processor, others for the GPU.
        folder: where Linux has the processor's counters (RAPL).
    """
    return _processor(folder) if provider == "cpu" else _gpu()


def measure_energy(
    models: Sequence[tuple[Runner, Sequence[Counter]]], batch: Batch
) -> list[dict[str, Any]]:
    """Run the models in turn, each alone, and return joules per run of the batch.

    Args:
        models: what runs, with the counters of what computes it. They count everything that the
            processor or GPU does meanwhile, idle power included.
    """
    spent_by: list[list[float]] = [[] for _ in models]
    for _ in range(_ROUNDS):
        for i, (runner, counters) in enumerate(models):
            before = [counter.joules() for counter in counters]
            begin, runs = time.perf_counter(), 0
            while not runs or time.perf_counter() - begin < _SECONDS:
                runner.run(batch)
                runs += 1
            spent = [
                now - then if now >= then else now - then + counter.wraps
                for now, then, counter in zip(
                    (c.joules() for c in counters), before, counters, strict=True
                )
            ]
            spent_by[i].append(sum(spent) / runs)
    return [
        {
            "joules": float(np.median(values)),
            "least": min(values),
            "most": max(values),
            "source": ", ".join(counter.source for counter in counters),
        }
        for (_, counters), values in zip(models, spent_by, strict=True)
    ]


def _processor(folder: Path) -> tuple[tuple[Counter, ...], str]:
    packages = sorted(folder.glob("intel-rapl:[0-9]")) if folder.is_dir() else []
    if not packages:
        return (), "this machine has no energy counters of its processor (RAPL)"
    counters = []
    for package in packages:
        file = package / "energy_uj"
        try:
            file.read_text(encoding="ascii")
            name = (package / "name").read_text(encoding="ascii").strip()
            wraps = int((package / "max_energy_range_uj").read_text(encoding="ascii")) / 1e6
        except (OSError, ValueError) as error:
            return (), f"{file} cannot be read ({type(error).__name__}); its reader must be root"
        counters.append(Counter(f"RAPL {name}", _microjoules(file), wraps))
    return tuple(counters), ""


def _microjoules(file: Path) -> Callable[[], float]:
    return lambda: int(file.read_text(encoding="ascii")) / 1e6


def _gpu() -> tuple[tuple[Counter, ...], str]:
    if find_spec("pynvml") is None:
        return (), "the GPU's counter is read by nvidia-ml-py, which is not installed"
    pynvml = import_module("pynvml")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return (), f"the GPU's counter cannot be read ({error})"
    name = pynvml.nvmlDeviceGetName(handle)
    return (
        Counter(f"NVML {name}", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
    ), ""
