"""First-order Taylor scores, against removals computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.errors import DataError
from compressor.passes.prune.structured.scores import taylor_scores
from compressor.types.channels import Member
from tests.compressor.passes.prune.channel_maps import chain
from tests.compressor.passes.prune.test_masking import products, swapped

MEMBERS = [Member("w0", 1, "output"), Member("w1", 0, "input")]
CHANNELS = swapped(chain([5, 2], frozen=frozenset({1})))


def test_it_is_the_squared_change_of_the_outputs_to_first_order():
    random = np.random.default_rng(0)
    first, second = random.standard_normal((3, 5)), random.standard_normal((5, 2))
    model = products({"w0": first.astype(np.float32), "w1": second.astype(np.float32)})
    images = random.standard_normal((4000, 3))
    batches = [{"x": part.astype(np.float32)} for part in np.split(images, 1000)]
    found = taylor_scores(model.graph(), CHANNELS, MEMBERS, batches, 0)
    # A unit's weights on both sides scale its share of the outputs: each side counts once.
    shares = (images @ first)[:, :, None] * second
    wanted = np.square(2 * shares).sum(2).mean(0)
    assert found[:5] == pytest.approx(wanted, rel=0.2)  # signs are random: 1000 draws
    assert (found[5:] == 0).all(), "units that do not lie on the members"


def test_one_output_of_one_sample_is_exact_and_repeats():
    random = np.random.default_rng(1)
    first, second = random.standard_normal((3, 5)), random.standard_normal((5, 1))
    model = products({"w0": first.astype(np.float32), "w1": second.astype(np.float32)})
    channels = swapped(chain([5, 1], frozen=frozenset({1})))
    x = random.standard_normal((1, 3))
    batch = {"x": x.astype(np.float32)}
    found, again = (
        taylor_scores(model.graph(), channels, MEMBERS, [batch], seed) for seed in (0, 7)
    )
    assert found[:5] == pytest.approx(np.square(2 * (x @ first)[0] * second[:, 0]), rel=1e-4)
    assert found == pytest.approx(again)


def test_no_data():
    model = products({"w0": np.ones((3, 5), np.float32), "w1": np.ones((5, 2), np.float32)})
    with pytest.raises(DataError, match="has no samples"):
        taylor_scores(model.graph(), CHANNELS, MEMBERS, [], 0)
