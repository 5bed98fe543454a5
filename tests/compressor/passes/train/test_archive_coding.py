"""Codes of weights when errors and bits have a price, and networks that compute with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.train.archive import coding as archive_coding
from compressor.passes.train.archive.code_assignment import CodeAssignment
from compressor.passes.train.archive.coded_network import Decoder, coded_network
from compressor.passes.train.archive.coding import (
    Coding,
    assigned,
    expected,
    first_coding,
    price_for,
    relaxed,
)
from compressor.passes.train.archive.sensitivity import Sensitivities
from compressor.passes.train.job import Micro
from tests.compressor.passes.train.small_qat import block


def gaussian(count: int = 600, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def coded(codes: torch.Tensor, book: torch.Tensor) -> Coding:
    """Return weights that take values exactly."""
    weights = book[codes.long()]
    return Coding(weights, book, codes.to(torch.uint8), torch.ones_like(weights))


def test_bytes_are_the_entropy_and_the_values() -> None:
    """A vector has no rows: zeros by their share, the others by theirs, and 2 bytes a value."""
    codes = torch.tensor([0] * 8000 + [1] * 4000 + [2] * 2000 + [3] * 2000)
    found = coded(codes, torch.tensor([0.0, 1.0, 2.0, 3.0])).nbytes
    assert found == pytest.approx(16000 * 1.75 / 8 + 8, rel=1e-3)
    nothing = coded(torch.zeros(8000), torch.tensor([0.0, 1.0])).nbytes
    assert nothing == pytest.approx(2.0, abs=0.2)


def test_bytes_of_a_few_weights_are_those_of_an_adaptive_coder() -> None:
    """Half a weight more is not zero, of one more in all (Krichevsky and Trofimov, 1981)."""
    few = coded(torch.tensor([0, 0, 0, 0, 1, 1, 2]), torch.tensor([0.0, 1.0, 2.0]))
    where = -3 * np.log2(3.5 / 8) - 4 * np.log2(4.5 / 8)
    assert few.nbytes == pytest.approx((where + 2 * np.log2(3 / 2) + np.log2(3)) / 8 + 3 * 2)
    single = coded(torch.tensor([0, 0, 0, 0, 0, 0, 1]), torch.tensor([0.0, 1.0]))
    where = -np.log2(1.5 / 8) - 6 * np.log2(6.5 / 8)
    assert single.nbytes == pytest.approx(where / 8 + 2 * 2)


@pytest.mark.parametrize(("rows", "columns"), [(2, 15), (2, 16), (15, 2), (16, 2), (40, 6)])
def test_rows_and_columns_of_sixteen_weights_have_their_own_share(rows: int, columns: int) -> None:
    away = torch.zeros(rows, columns, dtype=torch.bool)
    away[0] = True
    share = expected(away)
    assert bool((share[0, 1] > share[1, 1] + 0.01) == (columns >= 16))
    away = torch.zeros(rows, columns, dtype=torch.bool)
    away[:, 0] = True
    share = expected(away)
    assert bool((share[1, 0] > share[1, 1] + 0.01) == (rows >= 16))


def test_places_in_a_kernel_are_one_axis() -> None:
    away = torch.rand(5, 4, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    away[..., 2, 5] = True
    share = expected(away)
    assert torch.equal(share, expected(away.reshape(5, 4, 18)).reshape(away.shape))
    assert share[..., 2, 5].min() > share[..., 2, 4].max(), "not only its column of the kernel"


def test_rows_and_columns_say_where_the_others_are() -> None:
    away = torch.zeros(40, 60, dtype=torch.bool)
    away[:4, :30] = True
    share = expected(away)
    assert share[:4, :30].min() > 0.5
    assert share[4:].max() < 0.02
    assert share[:4, 30:].max() < 0.2
    book = torch.tensor([0.0, 1.0])
    scattered = away.flatten()[torch.randperm(2400, generator=torch.Generator().manual_seed(0))]
    apart = coded(scattered.reshape(40, 60).byte(), book).nbytes
    assert coded(away.byte(), book).nbytes < apart / 3
    kernels = expected(away.reshape(40, 6, 2, 5))
    assert kernels.shape == (40, 6, 2, 5)


def test_first_come_equal_steps_with_zero_among_them() -> None:
    coding = first_coding(gaussian(), 3)
    most = float(gaussian().abs().max())
    assert coding.book.unique().tolist() == pytest.approx([most * k / 3 for k in range(-3, 4)])
    assert coding.book[coding.zero] == 0.0
    away = (coding.weights[:, None] - coding.book.unique()[None]).abs().amin(1)
    decoded = coding.book[coding.codes.long()]
    assert torch.allclose((coding.weights - decoded).abs(), away)
    assert first_coding(torch.zeros(5), 3).book.abs().max() == 0.0
    assert first_coding(gaussian(), 1).book.tolist() == pytest.approx([-most, 0.0])
    assert len(coding.book) == 8
    assert coding.book.dtype == torch.float32
    assert first_coding(torch.zeros(0), 3).codes.numel() == 0


def test_a_value_that_few_weights_take_is_dear() -> None:
    """The bytes of its entry in the codebook are shared among them."""
    weights = torch.tensor([0.0] * 600 + [1.0] * 40 + [1.1])
    codes = torch.tensor([0] * 600 + [1] * 40 + [2], dtype=torch.uint8)
    book = torch.tensor([0.0, 1.0, 1.1, 0.0])
    coding = Coding(weights, book, codes, torch.ones(641))
    dear = 0.1**2 / 2 / (2 + np.log2(40) / 8 - 2 / 40)
    assert assigned(coding, 0.9 * dear, 0)[-1] == 2
    assert assigned(coding, 1.1 * dear, 0)[-1] == 1


def test_values_move_to_the_weighted_mean_and_zero_is_zero(monkeypatch) -> None:
    monkeypatch.setattr(archive_coding, "_ROUNDS", 1)
    weights, codes = torch.tensor([0.1, 0.6, 1.0, 2.0]), torch.tensor([0, 0, 1, 1]).byte()
    felt = torch.tensor([0.1, 0.0, 0.1, 0.3])
    coding = Coding(weights, torch.tensor([0.4, 1.1, 9.0]), codes, felt + 1e-9)
    found = relaxed(coding, 0.0)
    assert found.codes.tolist() == [0, 1, 1, 1]  # 0.6 is nearer to 1.1 than to 0
    assert found.book.tolist() == pytest.approx([0.0, 1.75, 9.0])


def test_what_is_taken_for_zero_costs_as_zero() -> None:
    """A row stays that is worth its bytes, though its zeros are nearer to 0 than to 0.4."""
    weights, codes = torch.zeros(1, 11), torch.zeros(1, 11, dtype=torch.uint8)
    weights[0, 0], codes[0, 0] = 1.0, 1
    coding = Coding(weights, torch.tensor([0.4, 1.0]), codes, torch.ones(1, 11))
    assert torch.equal(relaxed(coding, 1e-3).codes, codes)
    nothing = coded(torch.zeros(3, 4), torch.tensor([0.0, 1.0]))
    assert not relaxed(nothing, 1e-3).codes.any()


def test_without_a_price_each_weight_takes_the_nearest_value() -> None:
    coding = first_coding(gaussian(), 3)
    away = (coding.weights[:, None] - coding.book[None]).abs()
    away[:, coding.counts == 0] = torch.inf
    codes = assigned(coding, 0.0, coding.zero).long()
    assert torch.equal(away.gather(1, codes[:, None])[:, 0], away.amin(1))


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-6, 1e-1), st.integers(0, 5))
def test_no_other_value_costs_less(price: float, seed: int) -> None:
    coding = replace(first_coding(gaussian(60, seed), 3), sensitivity=gaussian(60, 9).abs())
    codes, zero = assigned(coding, price, coding.zero).long(), coding.zero
    nothing, something, values = coding.lengths(zero)
    lengths = something[:, None] + values[None].float()
    lengths[:, zero] = nothing
    lengths[:, coding.counts == 0] = torch.inf
    errors = (coding.weights[:, None] - coding.book[None]) ** 2
    costs = coding.sensitivity[:, None] / 2 * errors + price * lengths
    taken = costs.gather(1, codes[:, None])[:, 0]
    torch.testing.assert_close(taken, costs.min(1).values)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-4, 1e-1), st.integers(0, 5))
def test_a_row_or_column_stays_if_it_is_worth_its_bytes(price: float, seed: int) -> None:
    """Weight by weight first, then the rows, then the columns of what is left."""
    shape = (6, 10)
    coding = first_coding(gaussian(60, seed).reshape(shape), 3)
    coding = replace(coding, sensitivity=0.02 * gaussian(60, 9).abs().reshape(shape))
    nothing, something, values = coding.lengths(coding.zero)
    wanted = np.full(shape, coding.zero)
    gains = np.zeros(shape)
    used = [n for n, count in enumerate(coding.counts.tolist()) if count]
    for place in np.ndindex(shape):
        half, weight = float(coding.sensitivity[place]) / 2, float(coding.weights[place])
        costs = {
            n: half * (weight - float(coding.book[n])) ** 2
            + price * float(nothing[place] if n == coding.zero else something[place] + values[n])
            for n in used
        }
        best = min(costs, key=lambda n: costs[n])
        wanted[place], gains[place] = best, half * weight**2 - costs[best]
    vain = gains.sum(1) <= 0
    wanted[vain], gains[vain] = coding.zero, 0.0
    wanted[:, gains.sum(0) <= 0] = coding.zero
    assert assigned(coding, price, coding.zero).tolist() == wanted.tolist()


def test_dearer_bytes_are_fewer_and_sensitive_weights_keep_more() -> None:
    coding = first_coding(gaussian(), 4)
    sizes = [relaxed(coding, price).nbytes for price in (0.0, 0.1, 1.0, 10.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 3
    dull = replace(coding, sensitivity=torch.full_like(coding.weights, 0.01))
    assert relaxed(dull, 0.1).nbytes < relaxed(coding, 0.1).nbytes


def test_zero_is_a_value_and_unused_values_stay_so() -> None:
    found = relaxed(first_coding(gaussian(), 4), 0.3)
    assert found.book[found.zero] == 0.0
    unused = torch.nonzero(found.counts == 0).flatten()
    assert unused.numel()
    again = assigned(found, 0.0, found.zero)
    assert not torch.isin(again.long(), unused).any()


def test_one_price_fits_all_layers_into_the_bytes() -> None:
    codings = {"a": first_coding(gaussian(), 4), "b": first_coding(10 * gaussian(300, 1), 4)}
    whole = sum(c.nbytes for c in codings.values())
    for share in (0.8, 0.4):
        price = price_for(codings, share * whole)
        total = sum(relaxed(c, price).nbytes for c in codings.values())
        assert 0.6 * share * whole < total <= share * whole
        less = sum(relaxed(c, 0.998 * price).nbytes for c in codings.values())
        assert less > share * whole, "the least price"
        # What errors cost more is coded in more bits.
        bits = {n: relaxed(c, price).nbytes / c.weights.numel() for n, c in codings.items()}
        assert bits["b"] > bits["a"]


def test_rows_and_columns_that_are_worth_nothing_become_zero() -> None:
    """Most weights of theirs are not zero, so that no single one would become so."""
    book = torch.tensor([0.0, 1.0, 2.0])
    codes = torch.zeros(30, 40, dtype=torch.uint8)
    codes[:12] = 1
    codes[:, :3] = 2
    felt = torch.ones(30, 40)
    felt[4] = 1e-6
    felt[:, 1] = 1e-6
    coding = replace(coded(codes, book), sensitivity=felt)
    found = assigned(coding, 1e-3, 0)
    codes[4], codes[:, 1] = 0, 0
    assert torch.equal(found, codes)
    kernels = replace(
        coding,
        weights=coding.weights.reshape(30, 20, 1, 2),
        codes=coding.codes.reshape(30, 20, 1, 2),
        sensitivity=felt.reshape(30, 20, 1, 2),
    )
    gone = assigned(kernels, 1e-3, 0)
    assert not gone[4].any()
    assert gone[:, 0].any(), "a kernel of which a column is worth something"


def test_gradients_reach_values_and_weights() -> None:
    weight = torch.zeros(2, 2, requires_grad=True)
    book = torch.tensor([1.0, 5.0], requires_grad=True)
    codes = torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8)
    result = Decoder()(weight, book, codes)
    assert torch.equal(result, torch.tensor([[1.0, 5.0], [5.0, 5.0]]))
    factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.autograd.backward((result * factors).sum())
    assert torch.equal(weight.grad, factors)
    assert torch.equal(book.grad, torch.tensor([1.0, 9.0]))


def test_free_weights_are_floats_and_zeros_may_come_back() -> None:
    decoder = Decoder()
    weight = torch.tensor([0.3, 0.4], requires_grad=True)
    book = torch.tensor([0.0, 5.0], requires_grad=True)
    codes = torch.tensor([0, 1], dtype=torch.uint8)
    decoder.share = 0.75
    assert decoder(weight, book, codes).tolist() == pytest.approx([0.0, 0.25 * 0.4 + 0.75 * 5])
    decoder.share = 0.0
    result = decoder(weight, book, codes)
    assert torch.equal(result, torch.tensor([0.0, 0.4]))
    torch.autograd.backward((result * torch.tensor([2.0, 3.0])).sum())
    assert torch.equal(weight.grad, torch.tensor([2.0, 3.0]))
    assert torch.equal(book.grad, torch.zeros(2))


def micro(step: int) -> Micro:
    """Return a few samples for ``block``."""
    images = np.random.default_rng(step).normal(size=(4, 2, 6, 6)).astype(np.float32)
    return Micro(np.arange(4), {"x": torch.from_numpy(images)})


def test_sensitivities_follow_a_network_that_changes() -> None:
    carrier = block(norm=False)
    layers = {layer.weight: layer for layer in carrier.layers()}
    network = coded_network(carrier.graph(), layers, carrier.trainable(), 4, 5)
    felt = Sensitivities(network)
    felt.measure(map(micro, range(8)), lambda _: None)
    first, *_, last = layers
    before = felt.of(first).clone()
    assert before.min() > 0
    codings = network.codings()
    zero = codings[last].zero
    dead = replace(codings[last], codes=torch.full_like(codings[last].codes, zero))
    network.code({last: dead})
    for step in range(200):
        felt.follow(micro(step), step)
    assert felt.of(first).max() < 0.01 * before.max(), "nothing reads what it computes"
    saved = {name: tensor.clone() for name, tensor in felt.state_dict().items()}
    again = Sensitivities(network)
    again.load_state_dict(saved)
    assert torch.equal(again.of(first), felt.of(first))


def test_the_module_computes_what_is_written() -> None:
    carrier = block(norm=False)
    layers = {layer.weight: layer for layer in carrier.layers()}
    inner = carrier.with_graph(carrier.graph())
    network = coded_network(carrier.graph(), layers, carrier.trainable(), 3, 5)
    images = np.random.default_rng(0).normal(size=(4, 2, 6, 6)).astype(np.float32)
    # Values are shortened only when they are written: short ones from the start.
    network.code(
        {
            n: replace(c, book=torch.tensor([0, 0.5, -0.25, 0.125, 1, -1, 2, -0.5]))
            for n, c in network.codings().items()
        }
    )
    with torch.no_grad():
        (ours,) = network.module.eval()(x=torch.from_numpy(images)).values()
    (theirs,) = network.written(inner).runner().run({"x": images}).values()
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)


def test_bytes_fall_to_the_target_and_the_price_outlives_the_process() -> None:
    carrier = block(norm=False)
    layers = {layer.weight: layer for layer in carrier.layers()}
    network = coded_network(carrier.graph(), layers, carrier.trainable(), 4, 5)
    begin = network.nbytes()
    target = begin / 2
    measured = Sensitivities(network)
    measured.measure(map(micro, range(8)), lambda _: None)
    start = price_for(network.codings(measured.of), 0.9 * begin)

    def taken() -> CodeAssignment:
        felt = Sensitivities(network)
        felt.measure(map(micro, range(8)), lambda _: None)
        return CodeAssignment(network, felt, micro, start, target, 200)

    ours = taken()
    wanted = [ours.wanted(step) for step in (0, 40, 80, 200)]
    assert wanted == pytest.approx([begin, target * 2 ** (1 / 4), target, target])
    for step in range(180):
        ours.before(step)
        assert network.decoder.share == pytest.approx(min(max((step - 80) / 80, 0), 1))
        ours.after(step)
    assert network.nbytes() == pytest.approx(target, rel=0.25)
    assert ours.price != start
    saved = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    again = taken()
    again.load_state_dict(saved)
    assert again.price == ours.price
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, saved[name])
    before = network.codings()
    ours.before(190)  # codes stay at the end
    assert all(torch.equal(before[n].codes, c.codes) for n, c in network.codings().items())


def test_zero_stands_for_no_weight_of_a_vector_that_has_none() -> None:
    """The scales of norms are near one: none of their values may become zero for the others."""
    scales = torch.tensor([0.9, 1.0, 1.1, 1.2])
    coding = first_coding(scales, 5)
    assert float(coding.book[coding.zero]) == 0.0
    assert int(coding.counts[coding.zero]) == 0
    for _ in range(3):
        coding = relaxed(coding, 1e-9)
        assert torch.allclose(coding.book[coding.codes.long()], scales, atol=0.05)
