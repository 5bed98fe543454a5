"""Copies of options."""

from __future__ import annotations

from functools import cached_property

import pytest

from compressor.types.options import Options


class Counted(Options):
    """Options of which something is computed once."""

    limit: int = 3

    @cached_property
    def numbers(self) -> list[int]:
        """What there is up to the limit."""
        return list(range(self.limit))


@pytest.mark.parametrize("deep", [False, True])
def test_a_copy_computes_anew(deep: bool) -> None:
    first = Counted()
    assert first.numbers == [0, 1, 2]
    other = first.model_copy(update={"limit": 1}, deep=deep)
    assert other.numbers == [0]
    assert first.numbers == [0, 1, 2]
    assert other == Counted(limit=1)
    assert first.model_copy() == first
