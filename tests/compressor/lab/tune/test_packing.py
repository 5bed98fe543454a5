"""Bytes of layers in the tables are those of the file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compressor.lab.tune import workbench
from compressor.lab.tune.workbench import Workbench

IN_MEMORY = {"8": 100, "4": 50, "3": 50, "2": 50}  # bytes of one layer


def candidate(option: str, in_file: int) -> Any:
    carrier = {"a": IN_MEMORY[option], "b": IN_MEMORY[option], "table": 40}
    return SimpleNamespace(
        choice={"a": option, "b": option}, steps=[SimpleNamespace(carrier=carrier)], bytes=in_file
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(workbench, "layer_bytes", lambda carrier: carrier)
    return Workbench(*[None] * 6, objective="size")  # type: ignore[arg-type]


def test_codes_that_memory_holds_in_four_bits_take_fewer_in_the_file(bench: Any):
    """Layers of 3 and 2 bits cost as much as those of 4, and no choice of layers had any."""
    bench.see_packing([candidate("8", 270), candidate("4", 175), candidate("3", 145)])
    assert bench.packed == {"4": 1.0, "3": 0.75}  # the file's rest takes 70
    assert bench.costs(candidate("3", 145)) == {"a": 37.5, "b": 37.5, "table": 40}
    assert bench.costs(candidate("8", 270)) == {"a": 100, "b": 100, "table": 40}


def test_times_are_not_packed(bench: Any):
    bench.objective = "latency"
    bench.see_packing([candidate("8", 270), candidate("2", 100)])
    assert not bench.packed
