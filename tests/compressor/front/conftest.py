"""Fixtures for tests of the functions for Python programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compressor.run import timing


@pytest.fixture(scope="package", autouse=True)
def few_rounds() -> Iterator[None]:
    """Time artifacts in a few rounds only: how long models take is asked elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_BUDGET", 0.0)
        patch.setattr(timing, "_LEAST_OPENINGS", 2)
        yield
