"""The scale of a metric that a report or a history keeps by its name and its unit."""

from __future__ import annotations

import pytest

from compressor import catalog
from compressor.run.metrics.metrics import Metric, kept_scale


@pytest.mark.parametrize("name", catalog.names("metric"))
def test_a_gate_has_the_scale_of_the_run(name: str) -> None:
    """Which test judges a difference depends on it, and how wide the interval of an F1 is."""
    metric: Metric = catalog.load("metric", name)
    scale = metric.scale
    kept = {"name": name, "unit": metric.unit, "higher_is_better": metric.higher_is_better}
    assert kept_scale(kept, scale.factor, exponential=scale.exponential) == scale


def test_a_metric_of_the_users_own_may_count() -> None:
    own = Metric("own.py:metric", print, higher_is_better=False, code=print)
    kept = {"name": own.name, "unit": "", "higher_is_better": False}
    assert kept_scale(kept, 1.0, exponential=False) == own.scale
    assert own.scale.counts
    assert not own.scale.of_decisions
