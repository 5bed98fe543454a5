"""The choice by counting is the choice by sorting, whatever the numbers and how they are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.magnitude.ranking import (
    Counts,
    Criterion,
    Cut,
    Norm,
    count_coarse,
    count_fine,
    dropped,
    merged,
    place_of,
    scores,
    select,
    shares,
    value_of,
    without,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = ((1, 1), (1, 4), (4, 1), (2, 3), (16, 16))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, Criterion]:
    """A weight with many ties and zeros among its units, and by what it is ranked."""
    height, width = draw(st.sampled_from(BLOCKS))
    rows, columns = draw(st.integers(1, 6)) * height, draw(st.integers(1, 6)) * width
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(rows, columns, generator=generator)
    kind = draw(st.sampled_from(["plain", "few values", "zeros", "tiny"]))
    if kind == "few values":
        values = values.round()
    elif kind == "zeros":
        values *= torch.rand(rows, columns, generator=generator) < 0.3
    elif kind == "tiny":
        values *= 1e-40  # below the smallest normal float32
    norm = draw(st.sampled_from(["l1", "l2", "random"]))
    criterion = Criterion(norm, (height, width), draw(st.integers(0, 2**64 - 1)))
    return values.to(draw(st.sampled_from(DTYPES))), criterion


def by_sorting(matrix: torch.Tensor, criterion: Criterion, number: int) -> torch.Tensor:
    """Say which units go, in one look at all scores."""
    found, shift = scores(matrix, criterion)
    whole = found.reshape(-1).to(torch.int64) << shift
    gone = torch.zeros(whole.shape, dtype=torch.bool)
    gone[torch.argsort(whole, stable=True)[:number]] = True
    return gone.reshape(found.shape)


def by_counting(parts: list[tuple[torch.Tensor, int]], criterion: Criterion, number: int) -> Cut:
    """Find the threshold of a weight that is seen in parts."""
    found = [scores(part, criterion, row) for part, row in parts]
    coarse, rank = select(merged(count_coarse(*own) for own in found), number)
    score, rank = select(merged(count_fine(*own, coarse) for own in found), rank)
    before = 0
    for own, shift in found:
        held = int((own.to(torch.int64) << shift == score).sum())
        if rank <= held:
            return Cut(score, before + place_of(own, shift, score, rank))
        rank -= held
        before += own.numel()
    raise AssertionError


@given(matrices(), st.data())
def test_counting_parts_chooses_what_sorting_chooses(
    made: tuple[torch.Tensor, Criterion], data: st.DataObject
):
    matrix, criterion = made
    height, width = criterion.block
    units = matrix.numel() // (height * width)
    number = data.draw(st.integers(1, units))
    step = data.draw(st.integers(1, matrix.shape[0] // height)) * height
    parts = [(matrix[row : row + step], row) for row in range(0, matrix.shape[0], step)]
    cut = by_counting(parts, criterion, number)
    expected = by_sorting(matrix, criterion, number)
    assert torch.equal(dropped(matrix, criterion, cut), expected)
    assert int(expected.sum()) == number
    whole = without(matrix, criterion, cut)
    together = torch.cat([without(part, criterion, cut, row) for part, row in parts])
    assert torch.equal(together, whole)
    assert together.dtype == matrix.dtype
    spread = expected.repeat_interleave(height, 0).repeat_interleave(width, 1)
    assert torch.equal(whole, torch.where(spread, torch.zeros_like(matrix), matrix))


@given(matrices(), st.data())
def test_no_unit_that_stays_scores_less_than_one_that_goes(
    made: tuple[torch.Tensor, Criterion], data: st.DataObject
):
    matrix, criterion = made
    height, width = criterion.block
    number = data.draw(st.integers(1, matrix.numel() // (height * width)))
    gone = dropped(matrix, criterion, by_counting([(matrix, 0)], criterion, number))
    assert int(gone.sum()) == number
    blocks = matrix.to(torch.float64).reshape(gone.shape[0], height, gone.shape[1], width)
    values = blocks.abs() if criterion.norm == "l1" else blocks.square()
    means = values.mean((1, 3))
    if criterion.norm == "random":
        # Chance decides, but nothing goes while a unit of zeros is left.
        alive = means > 0
        assert not bool(alive[gone].any()) or not bool((~alive[~gone]).any())
    elif not bool(gone.all()):
        tolerance = 0 if criterion.single else 1e-6 * float(means.max())
        assert float(means[~gone].min()) >= float(means[gone].max()) - tolerance


@given(matrices(), st.data())
def test_scores_do_not_depend_on_how_rows_are_cut(
    made: tuple[torch.Tensor, Criterion], data: st.DataObject
):
    matrix, criterion = made
    height = criterion.block[0]
    row = data.draw(st.integers(0, matrix.shape[0] // height - 1)) * height
    whole, shift = scores(matrix, criterion)
    part, own_shift = scores(matrix[row:].clone(), criterion, row)
    assert shift == own_shift
    assert torch.equal(whole[row // height :], part)
    turned, _ = scores(matrix.T.contiguous().T, criterion)  # strides do not matter either
    assert torch.equal(turned, whole)


@pytest.mark.parametrize("block", [(1, 1), (2, 1), (3, 4), (6, 1)])
@pytest.mark.parametrize("norm", ["l1", "l2", "random"])
def test_more_than_is_worked_on_at_once(norm: Norm, block: tuple[int, int]):
    """The pieces are of 2 to the 18th elements: 256 rows of these."""
    matrix = torch.randn(600, 1024, generator=torch.Generator().manual_seed(0))
    criterion = Criterion(norm, block, 5)
    parts = [(matrix[row : row + 6], row) for row in range(0, 600, 6)]
    whole, _ = scores(matrix, criterion)
    assert torch.equal(whole, torch.cat([scores(part, criterion, row)[0] for part, row in parts]))
    cut = Cut(int(whole.flatten().kthvalue(whole.numel() // 2).values), -1)
    pruned = without(matrix, criterion, cut)
    assert torch.equal(pruned, torch.cat([without(p, criterion, cut, row) for p, row in parts]))
    assert 0.45 < float((pruned == 0).float().mean()) < 0.55


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_is_the_magnitude_bit_by_bit(dtype: torch.dtype):
    weights = torch.tensor([[0.0, -0.0, 1.5, -3.0, 2**-20]], dtype=dtype)
    for norm in ("l1", "l2"):
        found, shift = scores(weights, Criterion(norm))
        assert [value_of(int(s) << shift) for s in found[0]] == [0, 0, 1.5, 3, 2**-20]


def test_scores_of_blocks_are_means():
    weights = torch.tensor([[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    means, _ = scores(weights, Criterion("l1", (1, 2)))
    assert means.view(torch.float32).tolist() == [[3.5, 0], [0, 1]]
    roots, _ = scores(weights, Criterion("l2", (2, 2)))
    assert roots.view(torch.float32).tolist() == [[2.5, pytest.approx(0.5**0.5)]]


@pytest.mark.parametrize("norm", ["l1", "l2", "random"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_refused(norm: str, bad: float, dtype: torch.dtype):
    weights = torch.ones(4, 4, dtype=dtype)
    weights[1, 2] = bad
    for block in ((1, 1), (2, 2)):
        with pytest.raises(ValueError, match="not finite"):
            scores(weights, Criterion(norm, block))  # type: ignore[arg-type]  # parametrized


def test_random_scores_differ_by_key_and_spread_evenly():
    weights = torch.ones(1000, 100)
    first, _ = scores(weights, Criterion("random", key=1))
    second, _ = scores(weights, Criterion("random", key=2))
    assert not torch.equal(first, second)
    half = dropped(weights, Criterion("random", key=1), Cut(int(first.median()), 10**6))
    assert float(half[:500].float().mean()) == pytest.approx(0.5, abs=0.01)
    assert float(half[:, :50].float().mean()) == pytest.approx(0.5, abs=0.01)
    assert len(first.unique()) > 80_000  # type: ignore[no-untyped-call]  # torch's own


def test_a_quota_is_handed_out_in_order():
    assert shares(5, [3, 0, 4, 2]) == [3, 0, 2, 0]
    assert shares(0, [3]) == [0]


def test_there_must_be_enough_units():
    counts = Counts(torch.tensor([4]), torch.tensor([2]))
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"no unit {number} of 2"):
            select(counts, number)
    with pytest.raises(ValueError, match="no unit 2 of 1"):
        place_of(torch.tensor([[1, 2]]), 0, 2, 2)


@given(st.integers(0, 2**16 - 1), st.integers(-1, 4), st.sampled_from(DTYPES))
def test_a_threshold_of_another_dtype(low: int, last: int, dtype: torch.dtype):
    """Ranked with float32 weights, those of 16 bits meet thresholds that they cannot equal."""
    score = (0x3F80 << 16) + low  # from 1 on
    weights = torch.tensor([[1.0, 1.0, 1.0078125, 0.5, -1.0]], dtype=dtype)
    found = dropped(weights, Criterion(), Cut(score, last))
    values = weights.abs().float().view(torch.int32)
    expected = (values < score) | ((values == score) & (torch.arange(5) <= last))
    assert torch.equal(found, expected)


def splitmix(place: int, key: int) -> int:
    """Return the hash of a place, by whole numbers of any size."""
    mixed = ((place + 1) * 0x9E3779B97F4A7C15 + key) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


@pytest.mark.parametrize("key", [0, 5, 2**63 + 12345])
def test_random_scores_are_hashes_of_places(key: int):
    weights = torch.ones(6, 8)
    weights[2:4, 4:6] = 0
    weights[3, 4] = -0.0
    found, shift = scores(weights, Criterion("random", (2, 2), key), 10)
    expected = [((splitmix(5 * 4 + k, key) >> 46) + 1) << 12 for k in range(12)]
    expected[4 + 2] = 0  # all weights of the unit are zero
    assert (found.dtype, shift) == (torch.int32, 0)
    assert found.reshape(-1).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units", [2000, 9000, 140_000])
def test_counts_are_those_of_all_scores(dtype: torch.dtype, units: int):
    """From 131,072 scores on, or 8192 of 16 bits, they are counted in bins."""
    weights = torch.randn(2, units // 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, shift = scores(weights, Criterion())
    whole = (found.to(torch.int64) << shift).reshape(-1)
    coarse = count_coarse(found, shift)
    values, counts = whole.div(4096, rounding_mode="floor").unique(return_counts=True)
    assert torch.equal(coarse.values, values)
    assert torch.equal(coarse.counts, counts)
    assert coarse.values.dtype == torch.int64
    assert coarse.total == whole.numel()
    most = int(values[counts.argmax()])
    assert coarse.of(most) == int(counts.max())
    assert coarse.below(most) == int((whole < most * 4096).sum())
    for bin_ in (int(values[0]), most, int(values[-1])):
        fine = count_fine(found, shift, bin_)
        values_in, counts_in = whole[whole >> 12 == bin_].unique(return_counts=True)
        assert torch.equal(fine.values, values_in)
        assert torch.equal(fine.counts, counts_in)


def test_where_fine_bits_are_zero():
    assert Criterion().coarse_only("bfloat16")
    assert Criterion().coarse_only("float16")
    assert not Criterion().coarse_only("float32")
    assert not Criterion(block=(1, 4)).coarse_only("float16")
    assert Criterion("random", (1, 4)).coarse_only("float32")
    assert Criterion("random").coarse_only("bfloat16")


def test_ranks_and_places_by_hand():
    counts = Counts(torch.tensor([2, 5, 9]), torch.tensor([3, 1, 4]))
    ranked = {1: (2, 1), 3: (2, 3), 4: (5, 1), 5: (9, 1), 8: (9, 4)}
    assert {number: select(counts, number) for number in ranked} == ranked
    values = torch.tensor([[5, 1], [5, 5]], dtype=torch.int16)
    assert [place_of(values, 14, 5 << 14, rank) for rank in (1, 2, 3)] == [0, 2, 3]
    for rank in (0, 4):
        with pytest.raises(ValueError, match=f"no unit {rank} of 3"):
            place_of(values, 14, 5 << 14, rank)


def test_units_that_equal_the_threshold_go_up_to_a_place():
    weights = torch.ones(6, 6)
    weights[4:, 3:] = 2
    criterion = Criterion("l1", (2, 3))
    one = int(scores(weights, criterion)[0][0, 0])
    for last in range(-1, 6):
        gone = [place <= last for place in range(5)]
        expected = [gone[:2], gone[2:4], [gone[4], False]]
        cut = Cut(one, last)
        assert dropped(weights, criterion, cut).tolist() == expected
        assert dropped(weights[2:], criterion, cut, 2).tolist() == expected[1:]
        kept = without(weights[4:], criterion, cut, 4)
        assert bool((kept[:, :3] == 0).all()) == (last >= 4)
        assert bool((kept[:, 3:] == 2).all())
    narrow = Criterion("l1", (1, 2))
    cut = Cut(int(scores(weights, narrow)[0][0, 0]), 0)
    assert without(weights, narrow, cut).eq(0).nonzero().tolist() == [[0, 0], [0, 1]]
