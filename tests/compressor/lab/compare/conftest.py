"""A comparison that several tests judge."""

from pathlib import Path

import pytest

from compressor.lab.compare.compare import Comparison
from tests.compressor.lab.compare.made_runs import compared, results


@pytest.fixture
def worse(tmp_path: Path) -> Comparison:
    """18 of 4000 samples lost and 2 won: 0.4 points."""
    base, candidate = results(2, 4000, start=100), results(18, 4000)
    return compared(tmp_path, base, candidate)
