"""Channels are scaled only where the model's outputs stay what they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compressor.passes.prepare import equalize
from compressor.passes.prepare.equalize import Equalize
from compressor.passes.prepare.groups import scale_map
from compressor.passes.prepare.scales import ScaleMap
from compressor.passes.quantize.static import static
from compressor.types.passes import GraphPass
from tests.compressor.passes.prepare.networks import chain, stretched
from tests.compressor.passes.prepare.test_equalize import INTEGERS, applied
from tests.compressor.passes.quantize.small_models import graph, noise


def without_a_reader(*given) -> ScaleMap:
    """Return what can be scaled, but for a layer that reads the first channels."""
    found = scale_map(*given)
    first, *others = found.groups
    return replace(found, groups=(replace(first, reads=first.reads[:-1]), *others))


@pytest.mark.parametrize("declared", [Equalize(), INTEGERS])
def test_nothing_is_scaled_if_outputs_change(
    declared: GraphPass, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (equalize, static):
        monkeypatch.setattr(module, "scale_map", without_a_reader)
    network = stretched(chain(), 16.0)
    outcome = applied(declared, network)
    note, *_ = outcome.notes
    assert note.startswith("nothing was scaled: outputs would differ by ")
    assert note.endswith("and the limit is 1e-04; report it with the model")
    assert not any("equalized_db" in row.details for row in outcome.layers)
    assert outcome.rescale is None
    assert declared is INTEGERS or outcome.carrier is network


def test_a_network_that_magnifies_rounding_is_scaled() -> None:
    wide = noise(8, 6) * np.float32(2) ** np.arange(6, dtype=np.float32)
    network = graph(
        """g (float[N, 4] x) => (float[N, 3] y) {
            a = MatMul (x, first.weight)
            b = Relu (a)
            c = MatMul (b, second.weight)
            d = Relu (c)
            e = MatMul (d, third.weight)
            many = Constant <value_float = 1e6> ()
            f = Mul (e, many)
            y = Sin (f)
        }""",
        {"first.weight": noise(4, 8), "second.weight": wide, "third.weight": noise(6, 3)},
    )
    data = [{"x": noise(8, 4, seed=i)} for i in range(4)]
    outcome = applied(Equalize(activation_bits=4), network, data)
    wanted, found = (
        next(iter(c.runner().run(data[0]).values())) for c in (network, outcome.carrier)
    )
    assert np.abs(wanted - found).max() > 1e-3
    assert outcome.rescale is not None
