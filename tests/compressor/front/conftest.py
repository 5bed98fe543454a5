"""Fixtures for tests of the functions for Python programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compressor.brief_timing import briefly_timed


@pytest.fixture(scope="module", autouse=True)
def few_rounds() -> Iterator[None]:
    """Time artifacts in a few rounds only: how long models take is asked elsewhere."""
    with briefly_timed():
        yield
