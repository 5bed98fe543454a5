"""The search for an order of channels: never worse, much better where order is all there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.sparse import permutation
from compressor.passes.prune.sparse.permutation import kept_share, search_order


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_it_is_an_order_that_keeps_no_less(rows: int, groups: int, n: int, seed: int):
    m = n + 2
    scores = torch.rand(rows, groups * m, generator=torch.Generator().manual_seed(seed)) ** 3
    order = search_order(scores, n, m)
    assert sorted(order.tolist()) == list(range(groups * m))
    assert kept_share(scores[:, order], n, m) >= kept_share(scores, n, m)


def test_large_channels_side_by_side_are_spread():
    """In every row half of the channels are large: all of them stay only if they are spread."""
    scores = torch.rand(32, 64, generator=torch.Generator().manual_seed(0)) * 0.01
    scores[:, :32] += 1
    assert kept_share(scores, 2, 4) < 0.52
    assert kept_share(scores[:, search_order(scores, 2, 4)], 2, 4) > 0.99


def test_rows_that_are_unlike_are_weighed_against_each_other():
    random = torch.Generator().manual_seed(1)
    scores = torch.randn(64, 96, generator=random).abs() * torch.rand(96, generator=random)
    before, after = (kept_share(s, 2, 4) for s in (scores, scores[:, search_order(scores, 2, 4)]))
    assert after > before + 0.03  # measured: 0.847 and 0.904


def test_the_same_scores_give_the_same_order():
    scores = torch.rand(16, 40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(search_order(scores, 2, 4), search_order(scores.clone(), 2, 4))


def test_many_channels_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(permutation, "_CHANNELS", 16)
    scores = torch.rand(8, 40, generator=torch.Generator().manual_seed(3)) ** 2
    order = search_order(scores, 2, 4)
    assert sorted(order[:16].tolist()) == list(range(16))
    assert sorted(order.tolist()) == list(range(40))
    assert kept_share(scores[:, order], 2, 4) > kept_share(scores, 2, 4)


def test_few_rows_stand_for_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(permutation, "_WORK", 1.0)
    scores = torch.rand(500, 24, generator=torch.Generator().manual_seed(4))
    scores[:, :12] += 1
    assert kept_share(scores[:, search_order(scores, 2, 4)], 2, 4) > kept_share(scores, 2, 4)


def test_an_order_that_gains_nothing_is_left_as_it_is():
    assert search_order(torch.ones(3, 12), 2, 4).tolist() == list(range(12))
    assert search_order(torch.rand(3, 4), 2, 4).tolist() == list(range(4))
    with pytest.raises(ValueError, match="6 channels do not divide"):
        search_order(torch.ones(3, 6), 2, 4)


@pytest.mark.parametrize(
    ("rows", "channels", "n", "m", "before", "after"),
    # As measured: where the search ends.
    [
        (20, 24, 2, 4, 0.8226361, 0.8856639),
        (7, 18, 1, 3, 0.6749641, 0.7294000),
        (9, 40, 4, 8, 0.8951490, 0.9190881),
    ],
)
def test_the_search_ends_where_it_did(
    rows: int, channels: int, n: int, m: int, before: float, after: float
):
    scores = torch.rand(rows, channels, generator=torch.Generator().manual_seed(9)) ** 3
    assert kept_share(scores, n, m) == pytest.approx(before, rel=1e-6)
    order = search_order(scores, n, m)
    assert kept_share(scores[:, order], n, m) == pytest.approx(after, rel=1e-6)


def test_where_there_is_no_choice_the_order_stays():
    scores = torch.rand(3, 12, generator=torch.Generator().manual_seed(5))
    for n in (0, 4):
        assert search_order(scores, n, 4).tolist() == list(range(12))
    assert search_order(scores, 2, 12).tolist() == list(range(12))
    assert kept_share(torch.zeros(2, 4), 2, 4) == 1


def test_the_unit_of_the_scores_does_not_matter():
    scores = torch.rand(20, 24, generator=torch.Generator().manual_seed(9)) ** 3
    order = search_order(scores, 2, 4)
    assert order.tolist() != list(range(24))
    for power in (-40, 40):
        assert torch.equal(search_order(scores * 2.0**power, 2, 4), order)


def test_parts_are_two_groups_at_least(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(permutation, "_CHANNELS", 4)
    scores = torch.rand(8, 24, generator=torch.Generator().manual_seed(3)) ** 2
    order = search_order(scores, 2, 4)
    parts = [sorted(part.tolist()) for part in order.split(8)]
    assert parts == [list(range(start, start + 8)) for start in (0, 8, 16)]


@pytest.mark.parametrize(("share", "rounds"), [(0.99, 1), (1.0, 2), (1.01, 2)])
def test_the_work_of_all_rounds_is_bounded(
    share: float, rounds: int, monkeypatch: pytest.MonkeyPatch
):
    """The first round looks at all pairs of channels in all rows, and later ones at some."""
    done = []
    exchange = permutation._exchange

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        done.append(exchange(*arguments))
        return done[-1]

    monkeypatch.setattr(permutation, "_exchange", counted)
    scores = torch.rand(50, 64, generator=torch.Generator().manual_seed(6)) ** 3
    search_order(scores, 2, 4)
    assert len(done) > 3
    done.clear()
    monkeypatch.setattr(permutation, "_WORK", share * 64 * 64 * 50)
    search_order(scores, 2, 4)
    assert len(done) == rounds


def test_an_even_sample_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(permutation, "_WORK", 100 * 10 * 8.0**2)  # a hundred rows, ten times
    scores = torch.arange(298.0)[:, None].expand(298, 8)
    sample = permutation._sampled(scores)
    assert sample[:, 0].tolist() == [3.0 * row for row in range(100)]
    assert permutation._sampled(scores[:100]).shape == (100, 8)
    assert permutation._sampled(scores[:101]).shape == (100, 8)
    monkeypatch.setattr(permutation, "_WORK", 0.0)
    assert permutation._sampled(scores).shape == (64, 8)


@pytest.mark.parametrize(
    ("order", "taken"),
    [
        ([0, 1, 3, 2], False),  # the same pairs: it keeps no more
        ([1, 0, 2, 3], False),
        ([0, 2, 1, 3], True),  # 9 and 8 both stay
    ],
)
def test_only_an_order_that_keeps_more_is_taken(
    order: list[int], taken: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(permutation, "_searched", lambda *_: torch.tensor(order))
    scores = torch.tensor([[9.0, 8.0, 2.0, 1.0]])
    assert search_order(scores, 1, 2).tolist() == (order if taken else [0, 1, 2, 3])
    apart = torch.tensor([[9.0, 2.0, 8.0, 1.0]])  # nothing keeps more than this
    assert search_order(apart, 1, 2).tolist() == [0, 1, 2, 3]


def test_scores_may_be_halves():
    scores = (torch.rand(20, 24, generator=torch.Generator().manual_seed(9)) ** 3).bfloat16()
    assert kept_share(scores, 2, 4) == pytest.approx(kept_share(scores.double(), 2, 4), abs=1e-12)
    assert torch.equal(search_order(scores, 2, 4), search_order(scores.float(), 2, 4))


def test_the_search_ends_where_no_exchange_gains(monkeypatch: pytest.MonkeyPatch):
    changed = []
    exchange = permutation._exchange

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        groups = exchange(*arguments)
        changed.append(len(groups))
        return groups

    monkeypatch.setattr(permutation, "_exchange", counted)
    scores = torch.rand(20, 24, generator=torch.Generator().manual_seed(9)) ** 3
    search_order(scores, 2, 4)
    assert all(changed[:-1])
    assert changed[-1] == 0
    assert len(changed) < 20
