"""What pruning each group alone costs."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.passes.prune.criteria import Queue, allowed_counts, by_score
from compressor.passes.prune.structured.scores import SHARES, ranking_note, relative_error, scan
from compressor.types.channels import Flags
from compressor.types.tensors import Batch


def queue(start: int, count: int) -> Queue:
    units = np.arange(start, start + count)
    return by_score(units, np.zeros(count), allowed_counts(count, 1, 1))


def test_each_group_is_zeroed_alone():
    weights = np.array([1.0] * 8 + [3.0] * 8)
    seen: list[list[int]] = []

    def masked(removed: Flags) -> list[Batch]:
        seen.append(np.flatnonzero(removed).tolist())
        whole = weights * ~removed
        return [{"y": part, "n": np.array([1])} for part in (whole[:5], whole[5:])]

    found = scan(masked, [("cheap", queue(0, 8)), ("dear", queue(8, 8))], 16)
    assert seen[0] == []
    assert seen[1:4] == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert seen[4] == [8, 9]
    # Signal 8 + 72, error so many ones or nines.
    assert found[0].losses == pytest.approx((2 / 80, 4 / 80, 6 / 80))
    assert found[1].losses == pytest.approx((18 / 80, 36 / 80, 54 / 80))
    assert found[1].sqnr_db[1] == pytest.approx(10 * np.log10(80 / 36))
    note = ranking_note(found)
    assert note.index("dear 3.5 dB") < note.index("cheap 13.0 dB")


def test_long_rankings_are_shown_by_their_ends():
    found = scan(
        lambda removed: [{"y": np.arange(1.0, 25) * ~removed}],
        [(f"g{i:02}", queue(2 * i, 2)) for i in range(12)],
        24,
    )
    note = ranking_note(found)
    assert "most sensitive first: g11" in note
    assert "g06" not in note
    assert note.index("least:") < note.index("g00")


def test_no_change_is_no_loss():
    x = [{"y": np.array([1.0, -np.inf])}]
    assert relative_error(x, x) == 0
    assert relative_error([{"y": np.zeros(2)}], [{"y": np.ones(2)}]) == 0
    (found,) = scan(lambda _: x, [("g", queue(0, 4))], 4)
    assert found.sqnr_db == (None,) * len(SHARES)
    assert "g no change" in ranking_note([found])


def test_outputs_count_alike_whatever_their_size():
    """The scores of a detector beside boxes of hundreds of pixels."""
    exact = [{"boxes": np.full(4, 100.0), "scores": np.array([1.0, 0.0])}]
    lost = [{"boxes": np.full(4, 100.0), "scores": np.array([0.0, 0.0])}]
    assert relative_error(exact, lost) == pytest.approx(0.5)
