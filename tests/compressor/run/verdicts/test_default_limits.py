"""The limit that nobody set, of metrics whose value is zero."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.run.verdicts.verdicts import NO_SHARE, judge
from compressor.spec.keys import LimitKeys

ALONE = LimitKeys(size_ratio=None, latency_ratio=None)


def judged(
    name: str, drop: float | None, sqnr_db: float | None, zeros: float | None
) -> dict[str, Any]:
    """Judge an artifact of a float model whose metric, which is no share, is zero."""
    of_float = {"name": name, "value": 0.0, "samples": 400, "unit": ""}
    artifact = {
        "path": "model.onnx",
        "deployed": True,
        "metric": None if drop is None else {**of_float, "value": drop},
        "metric_reason": "no data" if drop is None else None,
        "metric_drop": drop,
        "metric_drop_ci95": None if drop is None else [drop, drop],
        "sqnr_db": sqnr_db,
        "max_abs_diff": 0.0,
        "latency": [],
        "latency_ratio_reason": "not timed",
        "latency_ms_reason": "not timed",
    }
    (found,) = judge(ALONE, [artifact], of_float, shrinks=True, zeros=zeros)
    return found


@pytest.mark.parametrize(
    ("drop", "sqnr_db", "limit", "verdict"),
    [
        (0.0, None, 0.02, "passed"),  # outputs that are equal have no error at all
        (0.02, 20.0, 0.02, "passed"),
        (0.021, 40.0, 0.02, "failed"),  # however large the artifact's outputs are beside its error
        (0.019, 3.0, 0.02, "passed"),
        (None, None, 0.02, "unknown"),
    ],
)
def test_an_error_of_zero_may_grow_by_one_percent_of_the_outputs(
    drop: float | None, sqnr_db: float | None, limit: float, verdict: str
) -> None:
    found = judged("mse", drop, sqnr_db, zeros=2.0)
    assert found["limit"] == pytest.approx(limit, abs=1e-4)
    assert found["verdict"] == verdict


def test_one_percent_of_nothing_is_no_limit() -> None:
    """What loses nothing keeps it anyway."""
    found = judged("own:metric", 0.1, 20.0, None)
    assert (found["verdict"], found["reason"]) == ("unknown", NO_SHARE)
    assert judged("own:metric", 0.0, 20.0, None)["verdict"] == "passed"
