"""Data that other processes prepare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.calibration.sources.random_access import RandomAccess
from compressor.calibration.sources.user_functions import FactorySource, TransformedSource
from compressor.errors import DataError
from compressor.passes.train.job import Order, Steps, read_steps
from compressor.run.training import RunTrainingData

ROOT = Path(__file__).parents[4]


def noughts() -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((4, 2), np.float32)}]


def halved(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array / 2 for name, array in batch.items()}


def steps(folder: Path, transform: Any) -> Steps:
    source = TransformedSource(FactorySource(noughts, "tests:noughts"), transform, "transform")
    data = RunTrainingData(None, "", "", RandomAccess(source, folder), folder)
    return Steps(data, Order(4, 2, 0), 2, 0)


def test_a_lambda_is_refused_where_processes_need_it(tmp_path: Path) -> None:
    given = steps(tmp_path, lambda batch: batch)
    with pytest.raises(DataError) as raised:
        next(read_steps(given, 0, 1, workers=2))
    text = str(raised.value)
    assert "training data: cannot be handed to 2 other processes (" in text
    assert "lambda" in text
    assert text.endswith("or set workers: 0")
    assert len(next(read_steps(given, 0, 1, workers=0))) == 1


HANDED_ON = """
import sys
from pathlib import Path
from tests.compressor.passes.train.test_workers import halved, read_steps, steps

if __name__ == "__main__":
    (micro,) = next(read_steps(steps(Path(sys.argv[1]), halved), 0, 1, workers=1))
    assert micro.tensors["x"].shape == (2, 2)
"""


@pytest.mark.slow
def test_a_function_of_a_module_is_handed_on(tmp_path: Path) -> None:
    script = tmp_path / "handed_on.py"
    script.write_text(HANDED_ON)
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
