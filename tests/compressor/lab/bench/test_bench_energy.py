"""Energy counters, played."""

from pathlib import Path

import numpy as np
import pytest

from compressor.lab.bench import energy
from compressor.lab.bench.energy import Counter, energy_counters, measure_energy
from compressor.types.tensors import Batch

BATCH = {"x": np.zeros((1, 1))}


def powercap(folder: Path, *microjoules: str) -> Path:
    for i, text in enumerate(microjoules):
        package = folder / f"intel-rapl:{i}"
        package.mkdir(parents=True)
        (package / "energy_uj").write_text(text)
        (package / "name").write_text(f"package-{i}\n")
        (package / "max_energy_range_uj").write_text("4000000")
        (folder / f"intel-rapl:{i}:0").mkdir()  # a part of the package, which counts it too
    return folder


def test_one_counter_for_each_package(tmp_path: Path):
    counters, reason = energy_counters("cpu", powercap(tmp_path / "p", "1500000\n", "250000\n"))
    assert [(c.source, c.joules(), c.wraps) for c in counters] == [
        ("RAPL package-0", 1.5, 4.0),
        ("RAPL package-1", 0.25, 4.0),
    ]
    assert reason == ""


def test_without_counters_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert energy_counters("cpu", tmp_path / "none") == (
        (),
        "this machine has no energy counters of its processor (RAPL)",
    )
    broken = powercap(tmp_path / "p", "denied")
    (broken / "intel-rapl:0" / "energy_uj").unlink()
    counters, reason = energy_counters("cpu", broken)
    assert counters == ()
    assert "cannot be read (FileNotFoundError)" in reason
    monkeypatch.setattr(energy, "find_spec", lambda _: None)
    assert energy_counters("cuda")[0] == ()
    assert "nvidia-ml-py, which is not installed" in energy_counters("cuda")[1]


def test_joules_of_a_run_and_a_counter_that_begins_anew(monkeypatch: pytest.MonkeyPatch):
    class Machine:
        now, joules = 0.0, 3.0

        def perf_counter(self) -> float:
            return self.now

    machine = Machine()

    class Model:
        runtime = "played"

        def __init__(self, joules: float):
            self.joules = joules

        def run(self, batch: Batch) -> Batch:
            machine.now += 0.1
            machine.joules = (machine.joules + self.joules) % 4.0
            return batch

    monkeypatch.setattr(energy, "time", machine)
    counter = Counter("played", lambda: machine.joules, wraps=4.0)
    one, other = measure_energy([(Model(0.2), [counter]), (Model(0.05), [counter])], BATCH)
    assert one["joules"] == pytest.approx(0.2)
    assert other["joules"] == pytest.approx(0.05)
    assert other["source"] == "played"
