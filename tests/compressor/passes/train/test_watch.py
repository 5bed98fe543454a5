"""Divergence, the best state, and Ctrl-C after the last step."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from compressor.passes.train import engine
from compressor.passes.train.finetune import Finetune
from compressor.passes.train.watch import Best, divergence, growth, last_losses
from compressor.types.passes import PassContext
from tests.compressor.passes.train.small_training import small, training


@pytest.mark.parametrize("loss", [math.nan, math.inf, 5000.0])
def test_losses_that_went_wrong(loss: float) -> None:
    assert divergence(loss, [2.0] * 20)


@pytest.mark.parametrize(
    ("loss", "before"),
    [
        (3.0, [2.0] * 20),
        (50.0, [2.0] * 20),
        (5000.0, [2.0] * 5),  # too few to know what is usual
        (0.9, [1e-6] * 20),  # far above the others, and still small
        (1.5, [-2.0] * 20),  # a likelihood's logarithm may have either sign
    ],
)
def test_losses_that_are_as_losses_are(loss: float, before: list[float]) -> None:
    assert divergence(loss, before) == ""


def test_messages_show_the_last_losses() -> None:
    assert last_losses([1, 2, 3, 4, 5, 6.25]) == "2, 3, 4, 5, 6.25"
    assert last_losses([]) == "none"


@pytest.mark.parametrize(("higher", "best"), [(True, 3.0), (False, 1.0)])
def test_the_best_value(higher: bool, best: float) -> None:
    found = Best(higher)
    assert (found.step, found.since) == (0, 0)
    improved = []
    for step, value in enumerate([2.0, 3.0, 1.0, 2.0], start=1):
        found.history.append((step, value))
        improved.append(found.step == step)
    assert (dict(found.history)[found.step], found.since) == (best, 2 if higher else 1)
    assert improved == ([True, True, False, False] if higher else [True, False, True, False])


def test_a_loss_that_grew_is_told() -> None:
    assert growth([1.0] * 20 + [2.0] * 20).startswith("the loss grew from 1 to 2: ")
    assert "lower learning-rate" in growth([0.1] * 20 + [2.3] * 20)
    assert growth([-0.9] * 20 + [-0.1] * 20)


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [1.0, 9.0],  # too few to tell
        [1.0] * 40,
        [1.0] * 20 + [1.4] * 20,
        [2.0] * 39 + [50.0],  # one batch that is hard
        [-0.5] * 20 + [-0.6] * 20,
        [-0.9] * 40,
    ],
)
def test_a_loss_that_did_not_grow(losses: list[float]) -> None:
    assert growth(losses) == ""


def test_an_interrupt_after_the_last_step_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on to its end, with exit code 0."""
    settled = engine._Loop._result

    def result(*arguments: Any) -> engine.Trained:
        os.kill(os.getpid(), signal.SIGINT)
        return settled(*arguments)

    monkeypatch.setattr(engine._Loop, "_result", result)
    start = small()
    with pytest.raises(KeyboardInterrupt):
        Finetune(steps=2).apply_training(
            start, PassContext(seed=3, metric="accuracy"), {}, training(tmp_path, start)
        )
