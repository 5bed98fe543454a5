"""When garbage is looked for."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compressor.models.garbage import freeze_objects, objects_frozen, without_collector
from tests.compressor.tiny_project import Project


@pytest.fixture
def looked() -> Iterator[list[Any]]:
    """Record the collections."""
    times: list[Any] = []

    def record(phase: str, info: dict[str, int]) -> None:
        times.append((phase, info))

    gc.callbacks.append(record)
    yield times
    gc.callbacks.remove(record)


def made(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


def test_the_collector_is_suspended_and_goes_on(looked: list[Any]) -> None:
    with without_collector():
        kept = made(100_000)
        assert not looked
    assert gc.isenabled()
    assert [info["generation"] for phase, info in looked if phase == "start"] == [1]
    assert not any(each is kept[0] for each in gc.get_objects(0) + gc.get_objects(1))
    with pytest.raises(ValueError), without_collector():  # noqa: PT011 - any error
        raise ValueError
    assert gc.isenabled()


def test_one_that_was_suspended_stays_so() -> None:
    with without_collector():
        with without_collector():
            pass
        assert not gc.isenabled()


@pytest.fixture
def thawed(uncounted_heap: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Freeze nothing; the tests' own process keeps its modules frozen."""
    monkeypatch.setattr(gc, "get_freeze_count", uncounted_heap)
    gc.unfreeze()
    yield
    gc.freeze()


def test_an_outer_block_keeps_its_objects(thawed: None) -> None:
    with objects_frozen():
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        kept = made(1000)
        with objects_frozen():
            assert gc.get_freeze_count() <= frozen
        assert gc.get_freeze_count() > frozen - 100
        freeze_objects()
        assert gc.get_freeze_count() > frozen + 900
        del kept
    assert gc.get_freeze_count() == 0


def test_objects_are_frozen_in_a_block_alone(thawed: None) -> None:
    freeze_objects()
    assert gc.get_freeze_count() == 0


def test_garbage_is_looked_for_once_when_a_run_is_planned(
    on_onnx: Project, looked: list[Any]
) -> None:
    on_onnx.plan()
    assert len(looked) == 2  # the start and the end
