"""Codes of weights when errors and bits have a price, and networks that compute with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.train.archive import coding as archive_coding
from compressor.passes.train.archive.coded_network import OPERATORS, coded_network
from compressor.passes.train.archive.coding import (
    Coding,
    assigned,
    coded_bytes,
    first_coding,
    price_for,
    relaxed,
)
from tests.compressor.passes.train.small_qat import block


def gaussian(count: int = 600, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_bytes_are_the_entropy_and_the_values() -> None:
    assert coded_bytes(torch.tensor([8, 4, 2, 2])) == pytest.approx(16 * 1.75 / 8 + 8)
    assert coded_bytes(torch.tensor([8, 0])) == 2.0
    assert coded_bytes(torch.tensor([8, 4, 2, 1, 1])) == pytest.approx(30 / 8 + 10)


def test_first_come_the_values_themselves_while_there_are_enough() -> None:
    for count in (8, 3):
        weights = torch.arange(float(count)) - 2
        coding = first_coding(weights, 3)
        assert torch.equal(coding.book[coding.codes.long()], weights)
        assert coding.book.tolist() == weights.tolist() + [0.0] * (8 - count)


def test_a_value_that_is_taken_once_is_as_dear_as_that() -> None:
    """Of eight weights: 3 bits, and 0.193 for the others; from 0.851 on, a weight is worth it."""
    weights = torch.tensor([0.0] * 6 + [0.84, 0.86])
    codes = torch.tensor([0] * 7 + [1], dtype=torch.uint8)
    coding = Coding(weights, torch.tensor([0.0, 1.0]), codes, torch.ones(8))
    assert assigned(coding, 1.0, 0).tolist() == codes.tolist()


def test_values_move_to_the_weighted_mean_and_zero_is_zero(monkeypatch) -> None:
    monkeypatch.setattr(archive_coding, "_ROUNDS", 1)
    weights, codes = torch.tensor([0.1, 0.6, 1.0, 2.0]), torch.tensor([0, 0, 1, 1]).byte()
    felt = torch.tensor([0.1, 0.0, 0.1, 0.3])
    coding = Coding(weights, torch.tensor([0.4, 1.1, 9.0]), codes, felt + 1e-9)
    found = relaxed(coding, 0.0)
    assert found.codes.tolist() == [0, 1, 1, 1]  # 0.6 is nearer to 1.1 than to 0
    assert found.book.tolist() == pytest.approx([0.0, 1.75, 9.0])


def test_without_a_price_each_weight_takes_the_nearest_value() -> None:
    coding = first_coding(gaussian(), 3)
    away = (coding.weights[:, None] - coding.book[None]).abs()
    assert torch.equal(assigned(coding, 0.0, coding.zero).long(), away.argmin(1))
    assert coding.book[coding.zero] == 0.0


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-6, 1e-1), st.integers(0, 5))
def test_no_other_value_costs_less(price: float, seed: int) -> None:
    coding = replace(first_coding(gaussian(60, seed), 3), sensitivity=gaussian(60, 9).abs())
    codes = assigned(coding, price, coding.zero).long()
    share = coding.counts / coding.counts.sum()
    bits = -share.log2()
    errors = (coding.weights[:, None] - coding.book[None]) ** 2
    costs = coding.sensitivity[:, None] / 2 * errors + price * bits[None] / 8
    taken = costs.gather(1, codes[:, None])[:, 0]
    torch.testing.assert_close(taken, costs.min(1).values)


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


def test_gradients_reach_values_and_weights() -> None:
    weight = torch.zeros(2, 2, requires_grad=True)
    book = torch.tensor([1.0, 5.0], requires_grad=True)
    codes = torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8)
    decode = OPERATORS["compressor.coding", "Decode"].function
    result = decode(weight, book, codes)
    assert torch.equal(result, torch.tensor([[1.0, 5.0], [5.0, 5.0]]))
    factors = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.autograd.backward((result * factors).sum())
    assert torch.equal(weight.grad, factors)
    assert torch.equal(book.grad, torch.tensor([1.0, 9.0]))


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
