"""Weights solved by least squares: against numpy's, and what they never do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from compressor.passes.prune.maths.least_squares import (
    Start,
    Sums,
    _solved,
    solve,
    solved_again,
    without_columns,
)
from compressor.passes.prune.maths.places import Window, pairs


def problem(seed: int, samples: int, columns: int, rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs ``[samples, columns]``, targets ``[samples, rows]`` and a weight."""
    torch.manual_seed(seed)
    inputs = torch.randn(samples, columns, dtype=torch.float64) @ torch.randn(
        columns, columns, dtype=torch.float64
    )
    targets = torch.randn(samples, rows, dtype=torch.float64)
    return inputs + 1.0, targets + inputs[:, :1], torch.randn(rows, columns, dtype=torch.float64)


def start(weight: Tensor, *, shifts: bool = True) -> Start:
    rows = len(weight)
    return Start(weight, torch.ones(rows, dtype=torch.float64), shifts, torch.ones(rows))


def sums(inputs: Tensor, targets: Tensor, parts: int = 2) -> list[Sums]:
    made = [Sums(inputs.shape[1], targets.shape[1]) for _ in range(parts)]
    for place, part in enumerate(made):
        part.add(inputs[place::parts], targets[place::parts])
    return made


def error(weight: Tensor, bias: Tensor, inputs: Tensor, targets: Tensor) -> float:
    return float((inputs @ weight.T + bias - targets).square().sum())


@given(st.integers(0, 999), st.integers(40, 90), st.integers(1, 9), st.booleans())
def test_without_a_penalty_it_is_what_numpy_solves(seed, samples, columns, shifts):
    inputs, targets, weight = problem(seed, samples, columns)
    first = start(weight, shifts=shifts)
    fit = solve(first, sums(inputs, targets), penalties=(0.0,))
    if fit.penalty is None:
        return  # the given weight did better on what was held out
    ones = np.ones((samples, 1)) if shifts else np.zeros((samples, 0))
    wanted, *_ = np.linalg.lstsq(
        np.hstack([inputs.numpy(), ones]), (targets - (0 if shifts else 1.0)).numpy(), rcond=None
    )
    assert fit.weight.numpy() == pytest.approx(wanted[:columns].T, rel=1e-6, abs=1e-6)
    assert fit.bias.numpy() == pytest.approx(wanted[columns] if shifts else 1.0, rel=1e-6, abs=1e-6)


@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 20), st.booleans())
def test_the_squared_error_never_grows(seed, samples, columns, shifts):
    """With fewer samples than columns, too, and with columns that are always zero or alike."""
    inputs, targets, weight = problem(seed, samples, columns)
    inputs[:, ::4] = 0.0
    inputs[:, 1::4] = inputs[:, :1] * 2
    first = start(weight, shifts=shifts)
    fit = solve(first, sums(inputs, targets))
    before = error(first.weight, first.bias, inputs, targets)
    assert error(fit.weight, fit.bias, inputs, targets) <= before * (1 + 1e-9) + 1e-9
    assert fit.after <= fit.before * (1 + 1e-9) + 1e-9
    assert torch.equal(fit.weight[:, ::4], weight[:, ::4]), "what is always zero tells nothing"


@pytest.mark.parametrize("shifts", [True, False])
def test_few_pairs_are_solved_as_many_are(shifts: bool):
    inputs, targets, weight = problem(0, 12, 40)
    first, parts = start(weight, shifts=shifts), sums(inputs, targets)
    multiplied = sums(inputs[:5], targets[:5])
    for place, part in enumerate(multiplied):  # asked for their products, they go on with these
        assert part.inputs.shape == (40, 40)
        part.add(inputs[5:][1 - place :: 2], targets[5:][1 - place :: 2])
        assert part.few is None
        assert parts[place].few is not None
    for penalties in ((1e-3,), (1e-5, 1e-1, 1.0)):
        found, wanted = solve(first, parts, penalties), solve(first, multiplied, penalties)
        assert found.penalty == wanted.penalty is not None
        assert torch.allclose(found.weight, wanted.weight, rtol=1e-7)
        assert torch.allclose(found.bias, wanted.bias, rtol=1e-7)
        assert found.before == pytest.approx(wanted.before)
        assert found.after == pytest.approx(wanted.after)


@pytest.mark.parametrize("shifts", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_groups_are_solved_as_each_alone(shifts: bool, rows: int):
    """Rows of a grouped convolution; the first group's inputs are dead."""
    groups = [problem(seed, 60, 4, rows) for seed in range(3)]
    groups[0][0].zero_()
    inputs, targets = (torch.cat([g[i] for g in groups], 1) for i in (0, 1))
    whole = start(torch.cat([g[2] for g in groups]), shifts=shifts)
    parts = [Sums(4, 3 * rows, 3) for _ in range(2)]
    for place, part in enumerate(parts):
        for half in (slice(0, 30), slice(30, 60)):
            part.add(inputs[half][place::2], targets[half][place::2])
    fit = solve(whole, parts, penalties=(1e-3,))
    again = solve(
        whole, [again_of(part, inputs, targets, i) for i, part in enumerate(parts)], (1e-3,)
    )
    assert torch.allclose(again.weight, fit.weight)
    for place, (x, y, weight) in enumerate(groups):
        rows_of = slice(place * rows, (place + 1) * rows)
        alone = [Sums(4, rows) for _ in range(2)]
        for fold, part in enumerate(alone):
            part.add(x[fold::2], y[fold::2])
        ((wanted, bias),) = _solved(start(weight, shifts=shifts), alone[0] + alone[1], [1e-3])
        assert torch.allclose(fit.weight[rows_of], wanted)
        assert torch.allclose(fit.bias[rows_of], bias)
        errors = (parts[0] + parts[1]).errors(fit.weight, fit.bias)[rows_of].sum()
        assert float(errors) == pytest.approx(error(wanted, bias, x, y))


def again_of(sums: Sums, inputs: Tensor, targets: Tensor, fold: int) -> Sums:
    """Return sums that take in the same targets once more."""
    made = sums.again()
    made.add(inputs[fold::2], targets[fold::2])
    return made


def test_few_pairs_cost_no_product_of_all_columns():
    """A layer of 512 columns and 512 rows on 8 pairs: 1.6e8 multiplications in place of 6e9."""
    inputs, targets = torch.randn(8, 512), torch.randn(8, 512)
    with FlopCounterMode(display=False) as counter:
        solve(start(torch.zeros(512, 512).double()), sums(inputs, targets))
    assert counter.get_total_flops() < 5e8


def test_sums_of_few_and_of_many_pairs_are_added():
    inputs, targets, _ = problem(0, 30, 10)
    few, many = Sums(10, 3), Sums(10, 3)
    few.add(inputs[:4], targets[:4])
    many.add(inputs[4:], targets[4:])
    assert few.few is not None
    assert many.few is None
    for joined in (few + many, many + few, few + few + many):
        assert joined.few is None
    joined = few + many
    assert torch.allclose(joined.inputs, inputs.T @ inputs)
    assert torch.allclose(joined.cross, targets.T @ inputs)
    assert torch.allclose((few + few).cross, 2 * targets[:4].T @ inputs[:4])
    assert joined.count == 30
    assert joined.finite()
    few.add(torch.full((1, 10), torch.inf), targets[:1])
    assert not (few + many).finite()


@given(st.integers(0, 999), st.integers(1, 4))
def test_what_others_can_replace_is_replaced(seed, lost):
    """Removed channels that are sums of kept ones: the output is what it was."""
    inputs, _, weight = problem(seed, 200, 6)
    removed = inputs @ torch.randn(6, lost, dtype=torch.float64)
    targets = torch.cat([inputs, removed], 1) @ torch.randn(6 + lost, 3, dtype=torch.float64)
    fit = solve(start(weight), sums(inputs, targets))
    assert fit.after < 1e-6


@pytest.mark.parametrize("shifts", [True, False])
@pytest.mark.parametrize("penalty", [1e-3, 0.5])
def test_without_columns_it_comes_nearest_to_what_it_gave(shifts: bool, penalty: float):
    """As numpy solves it, with a row for each weight that is to stay as it is."""
    inputs, _, weight = problem(0, 60, 6)
    first = Start(weight, torch.arange(3.0).double() - 5, shifts, torch.ones(3))
    all_of_it = Sums(6, 3)
    all_of_it.add(inputs, torch.zeros(60, 3))
    gone = torch.tensor([False, True, False, False, True, False])
    solved, bias = without_columns(first, all_of_it, gone, penalty)
    if penalty == 1e-3:
        found = without_columns(first, all_of_it, gone)
        assert torch.equal(found[0], solved), "that is the default"
    left, wanted = inputs[:, ~gone], inputs @ weight.T + (first.bias if shifts else 0.0)
    centre = left.mean(0) * shifts
    aim = wanted - wanted.mean(0) * shifts
    power = float((left - centre).square().sum(0).mean())
    root = (penalty * power) ** 0.5
    expected, *_ = np.linalg.lstsq(
        np.vstack([(left - centre).numpy(), root * np.eye(4)]),
        np.vstack([aim.numpy(), root * weight[:, ~gone].T.numpy()]),
        rcond=None,
    )
    assert solved[:, ~gone].numpy() == pytest.approx(expected.T, rel=1e-6)
    assert not solved[:, gone].any()
    shifted = wanted.mean(0) - solved[:, ~gone] @ centre if shifts else first.bias
    assert bias.numpy() == pytest.approx(shifted.numpy())


def test_where_nothing_is_learned_the_weight_stays():
    inputs, _, weight = problem(0, 400, 12)
    torch.manual_seed(1)
    noise = torch.randn(400, 3, dtype=torch.float64)
    exact = inputs @ weight.T + 1.0
    fit = solve(start(weight), sums(inputs, exact))
    assert fit.after == pytest.approx(0.0, abs=1e-12)
    alone = solve(start(weight, shifts=False), sums(inputs[:1], noise[:1], parts=2))
    assert alone.penalty is None, "with one sample nothing can be held out"
    assert torch.equal(alone.weight, weight)


def test_where_nothing_can_be_held_out_the_bias_alone_moves():
    inputs, _, weight = problem(0, 1, 12)
    wanted = inputs @ weight.T + 1.0
    fit = solve(start(weight), sums(inputs, wanted, parts=2))
    assert torch.equal(fit.weight, weight)
    assert fit.bias.numpy() == pytest.approx(np.full(len(weight), 1.0))
    assert fit.after == pytest.approx(0.0, abs=1e-12)


def test_overfitting_is_seen_on_what_was_held_out():
    """As many columns as samples: the smallest penalty fits all, and predicts nothing."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(40, 40, dtype=torch.float64), torch.zeros(3, 40)
    targets = torch.randn(40, 3, dtype=torch.float64)
    fit = solve(start(weight.double()), sums(inputs, targets))
    assert fit.penalty is None or fit.penalty >= 0.1


@pytest.mark.parametrize(
    "window",
    [
        Window((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        Window((3, 2), (2, 1), (0, 1, 2, 1), (1, 2)),
        Window((5,), (2,), (2, 1), (1,)),
        Window((2, 2, 1), (1, 1, 1), (0,) * 6, (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("wanted", [4, 10_000])
def test_patches_are_what_a_convolution_sees(window, wanted):
    rank = len(window.kernel)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    inputs = torch.randn(2, 3, *[11, 9, 5][:rank])
    weight = torch.randn(4, 3, *window.kernel)
    ends = list(zip(window.pads[:rank], window.pads[rank:], strict=True))
    padded = functional.pad(inputs, [n for pair in reversed(ends) for n in pair])
    outputs = convolve(padded, weight, stride=window.strides, dilation=window.dilations)
    x, (y,) = pairs(inputs, [outputs], window, wanted)
    assert torch.allclose(x @ weight.reshape(4, -1).T, y, atol=1e-4)
    places = outputs[0, 0].numel()
    assert y.shape[1] == places if wanted > places else wanted <= y.shape[1] <= 4 * places


@pytest.mark.parametrize(
    ("lengths", "wanted", "step"),
    [((10,), 3, 3), ((10,), 4, 2), ((10,), 11, 1), ((5, 4), 6, 3), ((), 5, 1)],
)
def test_products_look_at_each_so_many_th_place(lengths: tuple[int, ...], wanted: int, step: int):
    inputs, output = torch.randn(2, *lengths, 3), torch.randn(2, *lengths, 7)
    x, (y, same) = pairs(inputs, [output, output + 1], None, wanted)
    assert torch.equal(x, inputs.reshape(2, -1, 3)[:, ::step])
    assert torch.equal(y, output.reshape(2, -1, 7)[:, ::step])
    assert torch.equal(same, y + 1)


@pytest.mark.parametrize(
    ("lengths", "wanted", "steps"), [((64,), 4, (16,)), ((8, 12), 6, (4, 4)), ((9, 9), 9, (3, 3))]
)
def test_convolutions_look_at_an_even_grid(
    lengths: tuple[int, ...], wanted: int, steps: tuple[int, ...]
):
    ones = (1,) * len(lengths)
    image = torch.randn(2, 3, *lengths)
    window = Window(ones, ones, (0,) * 2 * len(lengths), ones)
    x, (y,) = pairs(image, [image], window, wanted)
    grid = image[(..., *(slice(None, None, step) for step in steps))]
    assert torch.equal(y, grid.flatten(2).transpose(1, 2))
    assert torch.equal(x, y)


def test_products_beyond_the_largest_number_are_not_finite():
    huge = Sums(1, 1)
    huge.add(torch.full((2, 1), 1e200, dtype=torch.float64), torch.zeros(2, 1))
    assert bool(torch.isfinite(huge.input_sum))
    assert not huge.finite()


def ridge(
    inputs: Tensor, targets: Tensor, weight: Tensor, penalty: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight and bias as numpy solves them, with a row for each weight that is to stay."""
    centre, aim = inputs.mean(0), targets.mean(0)
    power = float((inputs - centre).square().sum(0).mean())
    root = (penalty * power) ** 0.5
    solved, *_ = np.linalg.lstsq(
        np.vstack([(inputs - centre).numpy(), root * np.eye(inputs.shape[1])]),
        np.vstack([(targets - aim).numpy(), root * weight.T.numpy()]),
        rcond=None,
    )
    return solved.T, aim.numpy() - solved.T @ centre.numpy()


def test_the_penalty_is_the_best_on_parts_held_out_in_turn():
    importance, penalties = torch.tensor([1.0, 5.0, 0.2]), (1e-2, 1e-1, 1.0)
    chosen = []
    for seed in range(12):
        inputs, _, weight = problem(seed, 24, 5)
        targets = inputs @ weight.T + 1 + torch.randn(24, 3, dtype=torch.float64)
        first = Start(weight + 0.1 * (seed % 5) ** 2, torch.ones(3).double(), True, importance)
        errors = np.zeros(4)
        for part in range(3):
            held = torch.arange(24) % 3 == part
            fits = [ridge(inputs[~held], targets[~held], first.weight, p) for p in penalties]
            for place, (w, b) in enumerate([(first.weight.numpy(), np.ones(3)), *fits]):
                off = inputs[held].numpy() @ w.T + b - targets[held].numpy()
                errors[place] += (importance.numpy() * np.square(off)).sum()
        fit = solve(first, sums(inputs, targets, parts=3), penalties)
        assert fit.penalty == (None, *penalties)[int(errors.argmin())]
        chosen.append(fit.penalty)
    assert set(chosen) == {None, *penalties}


def test_errors_are_shares_of_the_variance_that_counts():
    inputs, targets, weight = problem(0, 24, 5)
    importance = torch.tensor([1.0, 5.0, 0.2])
    first = Start(weight, torch.ones(3).double(), True, importance)
    off = (inputs @ weight.T + 1.0 - 0.01 * targets).square() * importance
    variance = (0.01 * (targets - targets.mean(0))).square() * importance
    fit = solve(first, sums(inputs, 0.01 * targets))
    assert fit.before == pytest.approx(float(off.sum() / variance.sum()))
    constant = solve(start(weight), sums(inputs, torch.full((24, 3), 7.0).double()))
    assert constant.before == pytest.approx(error(weight, torch.ones(3), inputs, torch.tensor(7.0)))
    alone = solve(start(weight), sums(inputs[:1], targets[:1]))
    assert alone.before == pytest.approx(error(weight, torch.ones(3), inputs[:1], targets[:1]))


@pytest.mark.parametrize("pairs_of_inputs", [4, 16])  # with the pairs themselves, and their sums
def test_what_cannot_be_solved_stays(pairs_of_inputs: int):
    """Inputs that are all alike, without a penalty: the matrix is singular, and exactly so."""
    inputs, weight = torch.ones(pairs_of_inputs, 10).double(), torch.ones(1, 10).double()
    targets = torch.full((pairs_of_inputs, 1), 6.0).double()
    fit = solve(start(weight, shifts=False), sums(inputs, targets), penalties=(0.0,))
    assert torch.equal(fit.weight, weight)


def test_small_inputs_are_solved_as_large_ones_are():
    inputs, targets, weight = problem(0, 60, 6)
    large = solve(start(weight), sums(inputs, targets), (1e-2,))
    small = solve(start(1e8 * weight), sums(1e-8 * inputs, targets), (1e-2,))
    assert large.penalty == small.penalty == 1e-2
    assert torch.allclose(1e-8 * small.weight, large.weight, rtol=1e-6)


def test_pairs_are_kept_though_their_buffer_is_used_again():
    inputs, targets, _ = problem(0, 3, 10)
    buffers, kept = (inputs.clone(), targets.clone()), Sums(10, 3)
    kept.add(*buffers)
    for buffer in buffers:
        buffer.zero_()
    assert torch.equal(kept.inputs, inputs.T @ inputs)
    assert torch.equal(kept.cross, targets.T @ inputs)


def test_a_layer_is_solved_again_where_that_comes_nearer():
    inputs, targets, weight = problem(0, 60, 6)
    first, parts = start(weight), sums(inputs, targets)
    fit = solve(first, parts)
    aims = sums(inputs, 0.1 * targets)
    again, fresh = solved_again(first, aims, fit), solve(first, aims)
    assert torch.equal(again.weight, fresh.weight)
    assert torch.equal(again.bias, fresh.bias)
    assert (again.before, again.variance) == (fit.before, fit.variance)
    left = error(again.weight, again.bias, inputs, 0.1 * targets)
    assert again.after == pytest.approx(left / fit.variance)
    # The best without a penalty is nearer than that with one; both are far from exact.
    best = solve(first, parts, penalties=(0.0,))
    assert best.variance > 1
    assert solved_again(first, parts, best) is best
    # Where nothing can be held out nothing is solved, though the weight as it is would be exact.
    alone = sums(inputs[:1], inputs[:1] @ weight.T + 1.0)
    assert solved_again(start(weight, shifts=False), alone, fit) is fit


@pytest.mark.parametrize(("groups", "columns"), [(1, 1100), (2, 600)])
def test_what_wide_inputs_vary_by_is_not_lost_beside_their_mean(groups: int, columns: int):
    generator = torch.Generator().manual_seed(0)
    inputs = 10 + 1e-3 * torch.randn(3000, groups * columns, generator=generator)
    targets = 5 + 1e-3 * torch.randn(3000, 2 * groups, generator=generator)
    sums = Sums(columns, 2 * groups, groups)
    for part in range(0, 3000, 1000):
        sums.add(inputs[part : part + 1000], targets[part : part + 1000])
    for group in range(groups):
        x, t = (v.chunk(groups, 1)[group].double() for v in (inputs, targets))
        mean = x.mean(0)
        centred = sums.inputs.reshape(groups, columns, columns)[group] - 3000 * mean.outer(mean)
        assert torch.allclose(centred, (x - x.mean(0)).T @ (x - x.mean(0)), atol=1e-8)
        cross = sums.cross[2 * group : 2 * group + 2] - 3000 * t.mean(0).outer(mean)
        assert torch.allclose(cross, (t - t.mean(0)).T @ (x - x.mean(0)), atol=1e-8)
