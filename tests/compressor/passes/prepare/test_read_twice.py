"""Small networks in which a weight or a value is read in two places: scaling keeps the function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compressor.passes.prepare.balance import Balance, ScaledGroup, scaled_weights
from compressor.passes.prepare.groups import scale_map
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.scales import ScaleMap
from compressor.types.carrier import Carrier
from tests.compressor.passes.quantize.small_models import graph, noise

WIDE = {"first.weight": noise(4, 5), "second.weight": noise(5, 4), "twice.weight": noise(4, 4)}
NETWORKS = {
    "a layer on two inputs": (
        """a = MatMul (x, twice.weight)
           b = Tanh (x)
           c = MatMul (b, twice.weight)
           y = Add (a, c)""",
        WIDE,
    ),
    "a layer on its own output": (
        """a = MatMul (x, twice.weight)
           b = Tanh (a)
           c = Tanh (b)
           y = MatMul (c, twice.weight)""",
        WIDE,
    ),
    "a weight that is a table too": (
        """i = Constant <value_ints: ints = [0, 1]> ()
           t = Gather <axis = 0> (twice.weight, i)
           r = ReduceMean <keepdims = 0> (t)
           a = MatMul (x, twice.weight)
           y = Add (a, r)""",
        WIDE,
    ),
    "a value times itself": (
        """a = MatMul (x, first.weight)
           s = Mul (a, a)
           b = Div (a, s)
           y = MatMul (b, second.weight)""",
        WIDE,
    ),
    "a slope that another layer writes": (
        """a = MatMul (x, first.weight)
           s = MatMul (x, third.weight)
           r = Relu (s)
           b = PRelu (a, r)
           c = MatMul (b, second.weight)
           d = MatMul (r, fourth.weight)
           y = Add (c, d)""",
        {**WIDE, "third.weight": noise(4, 5, seed=1), "fourth.weight": noise(5, 4, seed=2)},
    ),
}


def scaled(carrier: Carrier, scales: ScaleMap) -> Carrier:
    """Divide channels by factors from 1/8 to 8."""
    random = torch.Generator().manual_seed(0)
    groups = tuple(
        ScaledGroup(group, 8 ** (2 * torch.rand(group.count, generator=random) - 1), 0.0)
        for group in scales.groups
    )
    return Balance(scaled_weights(carrier, groups), groups, {}).applied(carrier)


@pytest.mark.parametrize("case", NETWORKS)
def test_what_is_read_twice_keeps_its_function(case: str):
    nodes, weights = NETWORKS[case]
    used = {name: array for name, array in weights.items() if name in nodes}
    carrier = graph(f"g (float[N, 4] x) => (float[N, 4] y) {{ {nodes} }}", used)
    names = [layer.name for layer in carrier.layers() if layer.is_linear]
    parameters = carrier.tensors().keys()
    none = ScaleMap((), (), {}, "")
    batch = {"x": noise(6, 4, seed=9)}
    (wanted,) = carrier.runner().run(batch).values()
    for scales in (
        scale_map(carrier.graph(), parameters),
        with_product_groups(none, carrier.graph(), names, parameters),
    ):
        (found,) = scaled(carrier, scales).runner().run(batch).values()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_grid_keeps_its_scale():
    """Where to look in an image is no multiple of a factor."""
    carrier = graph(
        """g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) {
            a = Conv (x, first.weight)
            w = Conv (x, where.weight)
            grid = Transpose <perm = [0, 2, 3, 1]> (w)
            b = GridSample <padding_mode = "border"> (a, grid)
            c = Conv (b, second.weight)
            d = Conv (w, other.weight)
            y = Add (c, d)
        }""",
        {"first.weight": noise(5, 3, 1, 1), "where.weight": 0.1 * noise(2, 3, 1, 1)}
        | {"second.weight": noise(3, 5, 1, 1), "other.weight": noise(3, 2, 1, 1)},
    )
    scales = scale_map(carrier.graph(), carrier.tensors())
    assert [group.name for group in scales.groups] == ["first"]
    batch = {"x": noise(2, 3, 4, 4, seed=9)}
    (wanted,), (found,) = (
        c.runner().run(batch).values() for c in (carrier, scaled(carrier, scales))
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


GATED = """u = MatMul (x, up.weight)
    a = Add (u, bias)
    b = MatMul (x, gate.weight)
    s = Sigmoid (b)
    p = Mul (a, s)
    y = MatMul (p, down.weight)"""
HEADS = """a = MatMul (x, up.weight)
    h = Reshape (a, heads)
    t = Transpose <perm = [0, 2, 1]> (h)
    b = Transpose <perm = [0, 2, 1]> (t)
    p = Reshape (b, joined)
    y = MatMul (p, down.weight)"""


@pytest.mark.parametrize("nodes", [GATED, HEADS], ids=["gated", "heads"])
def test_all_values_that_are_scaled_are_named(nodes: str):
    """Ranges are found again for them; those of before would cut off most of what they hold."""
    weights = {
        f"{name}.weight": noise(6, 6, seed=i) for i, name in enumerate(("up", "gate", "down"))
    }
    weights |= {"heads": np.array([0, 2, 3]), "joined": np.array([0, 6])}
    weights["bias"] = noise(6, seed=4)
    used = {name: array for name, array in weights.items() if name in nodes}
    carrier = graph(f"g (float[N, 6] x) => (float[N, 6] y) {{ {nodes} }}", used)
    scales = with_product_groups(
        ScaleMap((), (), {}, ""), carrier.graph(), ["down"], carrier.tensors().keys()
    )
    (group,) = scales.groups
    after = scaled(carrier, scales)
    values = [v.name or "" for node in carrier.graph().graph for v in node.outputs]
    batch = {"x": noise(6, 6, seed=9)}
    old, new = (c.runner(values).run(batch) for c in (carrier, after))
    changed = {v for v in values if not np.allclose(old[v], new[v], rtol=1e-3, atol=1e-5)}
    assert changed == {*group.values, *group.others}
    assert changed == set(values) - {"y", "s"} - ({"b"} if nodes is GATED else set())
