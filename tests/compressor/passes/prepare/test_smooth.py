"""The pass ``smooth``: channels in front of products of matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from compressor.errors import SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prepare.balance import Balance, ScaledGroup, scaled_weights
from compressor.passes.prepare.equalize import Smooth
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.scales import ScaleMap
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import Array, Batch, TensorSpec
from tests.compressor.passes.prepare.test_equalize import applied
from tests.compressor.passes.quantize.small_models import Block, graph, noise

WIDE = np.exp2(np.linspace(-5, 5, 8)).astype(np.float32)
POSITIONS = 6


def tokens(seed: int) -> Batch:
    return {"x": noise(4, POSITIONS, 8, seed=seed)}


BATCHES = [tokens(seed) for seed in range(8)]


def encoder() -> OnnxCarrier:
    """A layer norm behind a sum, read by a layer and by the next sum, and an inner activation."""
    return graph(
        f"""g (float[N, {POSITIONS}, 8] x) => (float[N, {POSITIONS}, 8] y) {{
            a = MatMul (x, first.weight)
            n = LayerNormalization (a, scale, bias)
            b = MatMul (n, up.weight)
            c = Gelu (b)
            d = MatMul (c, down.weight)
            y = Add (n, d)
        }}""",
        {
            "first.weight": noise(8, 8),
            "scale": WIDE,
            "bias": noise(8),
            "up.weight": noise(8, 16, seed=2) / WIDE[:, None],
            "down.weight": noise(16, 8, seed=3),
        },
    )


def output(carrier: Carrier) -> Array:
    return next(iter(carrier.runner().run(tokens(99)).values()))


def error(carrier: Carrier, after: Carrier) -> float:
    wanted = output(carrier)
    return float(np.abs(output(after) - wanted).max() / np.abs(wanted).max())


def test_a_node_divides_what_something_else_reads_too():
    network = encoder()
    planned = {row.name: row for row in Smooth().survey(network, PassContext()).layers}
    assert planned["up"].action == "scale input channels (a Mul)"
    outcome = applied(Smooth(), network, BATCHES)
    assert error(network, outcome.carrier) < 1e-5
    gains = {row.name: row.details["equalized_db"] for row in outcome.layers}
    assert gains.keys() == {"up"}
    assert gains["up"] > 10
    kinds = [node.op_type for node in outcome.carrier.graph().graph]
    assert kinds.count("Mul") == 1


def test_static_quantization_of_an_encoder_loses_less():
    network = encoder()
    rules = [{"match": "*"}]
    steps = [
        QuantizeStatic.model_validate({"prepare": prepare, "layers": rules}, strict=False)
        for prepare in ("none", "auto")
    ]
    before, after = (error(network, applied(step, network, BATCHES).carrier) for step in steps)
    assert after < before / 2


def test_a_layer_that_reads_a_part_of_each_head():
    """Errors are followed along heads there, and the layer's inputs lie on another axis."""
    network = graph(
        f"""g (float[N, {POSITIONS}, 8] x) => (float[N, {POSITIONS}, 8] y) {{
            a = MatMul (x, first.weight)
            b = Relu (a)
            [split] h = Reshape (b, heads)
            [turned] t = Transpose <perm = [0, 2, 1, 3]> (h)
            s = MatMul (t, gate.weight)
            [back] w = Transpose <perm = [0, 2, 1, 3]> (s)
            [joined] y = Reshape (w, whole)
        }}""",
        {
            "first.weight": noise(8, 8),
            "gate.weight": noise(4, 4),
            "heads": np.array([0, POSITIONS, 2, 4]),
            "whole": np.array([0, POSITIONS, 8]),
        },
    )
    step = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)
    assert error(network, applied(step, network, BATCHES).carrier) < 0.05


def test_a_model_without_products_of_matrices_is_an_error():
    image = graph(
        "g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { y = Conv (x, only.weight) }",
        {"only.weight": noise(4, 3, 3, 3)},
    )
    with pytest.raises(SpecError, match=r"touches no layer.*product of matrices"):
        Smooth().survey(image, PassContext())


def _module() -> TorchCarrier:
    torch.manual_seed(0)
    return TorchCarrier(Block(8), [TensorSpec("x", ("batch", POSITIONS, 8), "float32")])


def siamese() -> OnnxCarrier:
    """Two branches through one layer, and a layer whose weight is read by something else too."""
    return graph(
        f"""g (float[N, {POSITIONS}, 8] x) => (float[N, {POSITIONS}, 8] y) {{
            n = LayerNormalization (x, scale, bias)
            m = Relu (n)
            left = MatMul (n, both.weight)
            right = MatMul (m, both.weight)
            a = Add (left, right)
            b = Gelu (a)
            c = MatMul (b, alone.weight)
            d = MatMul (c, read.weight)
            most = ReduceMax <keepdims = 0> (read.weight)
            y = Add (d, most)
        }}""",
        {
            "scale": WIDE,
            "bias": noise(8),
            "both.weight": noise(8, 16),
            "alone.weight": noise(16, 8, seed=2),
            "read.weight": noise(8, 8, seed=3),
        },
    )


@pytest.mark.parametrize("make", [encoder, siamese, _module])
def test_scaled_networks_compute_the_same(make: Callable[[], Carrier]):
    """Norms, the values that attention mixes, and nodes take any factors."""
    network = make()
    names = [layer.name for layer in network.layers()]
    empty = ScaleMap((), (), {}, "")
    groups = with_product_groups(empty, network.graph(), names, network.tensors().keys()).groups
    assert any(group.inserted for group in groups)
    random = torch.Generator().manual_seed(1)
    scaled = tuple(
        ScaledGroup(g, torch.exp2(4 * torch.rand(g.count, generator=random) - 2), 0.0)
        for g in groups
    )
    after = Balance(scaled_weights(network, scaled), scaled, {}).applied(network)
    assert error(network, after) < 1e-5


def test_a_module_can_be_trained_afterwards():
    network = _module()
    outcome = applied(Smooth(), network, BATCHES)
    assert outcome.carrier.offers == network.offers


@pytest.mark.parametrize("moved", ["", "z = Transpose <perm = [0, 1, 3, 2]> (b)"])
def test_no_node_scales_what_a_convolution_of_integers_has_rounded(moved: str):
    """Behind the node it would be rounded a second time."""
    value = "z" if moved else "b"
    network = graph(
        f"""g (float[N, 3, 6, 6] x) => (float[N, 8, 6, 4] y) {{
            a = Conv (x, first.weight)
            b = Relu (a)
            {moved}
            y = MatMul ({value}, second.weight)
        }}""",
        {"first.weight": noise(8, 3, 1, 1), "second.weight": noise(6, 4)},
    )
    uneven = np.float32(4) ** np.arange(6, dtype=np.float32)
    uneven = uneven[:, None] if moved else uneven
    batches = [{"x": noise(8, 3, 6, 6, seed=i) * uneven} for i in range(4)]
    declared = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)
    outcome = applied(declared, network, batches)
    assert outcome.rescale is None
    assert not any("equalized_db" in row.details for row in outcome.layers)
