"""What pruning each group alone costs, and the search for a latency."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.errors import SpecError
from compressor.passes.prune.criteria import Queue, Ranking, allowed_counts, by_score, by_share
from compressor.passes.prune.structured.scores import SHARES, ranking_note, relative_error, scan
from compressor.passes.prune.structured.selection import search_latency
from compressor.types.channels import Flags
from compressor.types.tensors import Batch
from tests.compressor.passes.prune.channel_maps import chain


def queue(start: int, count: int) -> Queue:
    units = np.arange(start, start + count)
    return by_score(units, np.zeros(count), allowed_counts(count, 1, 1))


def test_each_group_is_zeroed_alone():
    weights = np.array([1.0] * 8 + [3.0] * 8)
    seen: list[list[int]] = []

    def masked(removed: Flags) -> Batch:
        seen.append(np.flatnonzero(removed).tolist())
        return {"y": weights * ~removed, "n": np.array([1])}

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
        lambda removed: {"y": np.arange(1.0, 25) * ~removed},
        [(f"g{i:02}", queue(2 * i, 2)) for i in range(12)],
        24,
    )
    note = ranking_note(found)
    assert "most sensitive first: g11" in note
    assert "g06" not in note
    assert note.index("least:") < note.index("g00")


def test_no_change_is_no_loss():
    x = {"y": np.array([1.0, -np.inf])}
    assert relative_error(x, x) == 0
    assert relative_error({"y": np.zeros(2)}, {"y": np.ones(2)}) == 0
    (found,) = scan(lambda _: x, [("g", queue(0, 4))], 4)
    assert found.sqnr_db == (None,) * len(SHARES)
    assert "g no change" in ranking_note([found])


def shares() -> tuple[Ranking, object]:
    channels = chain([32, 32, 2], frozen=frozenset({2}))
    queues = tuple(by_share(queue(32 * i, 32)) for i in range(2))
    return Ranking(queues, channels.count, np.zeros(0, np.int64)), channels.macs


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("overhead", [0.0, 0.2])
def test_the_latency_is_met_with_little_to_spare(target, overhead):
    ranking, macs = shares()
    whole = macs(ranking.removed(0))
    measured = []

    def time(removed: Flags) -> float:
        measured.append(overhead + (1 - overhead) * macs(removed) / whole)
        return measured[-1]

    _, ratio = search_latency(ranking, macs, time, target)
    assert len(measured) <= 7
    assert target - 0.05 < ratio <= target
    assert ratio in measured


def test_a_latency_out_of_reach_says_what_was_measured():
    ranking, macs = shares()
    with pytest.raises(SpecError, match=r"target.latency: is 0.5, and 0.90 was measured") as raised:
        search_latency(ranking, macs, lambda _: 0.9, 0.5)
    assert "0.92" in raised.value.remedy
