"""What can be scaled in a graph, and that scaling it keeps the function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.prepare.groups import scale_map
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.passes import PassContext
from tests.compressor.passes.prepare.networks import chain, image, stretched, tied_network
from tests.compressor.passes.quantize.small_models import graph, noise


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), pieces=st.integers(1, 8))
def test_scaled_networks_compute_the_same(seed: int, pieces: int):
    network = tied_network(seed, pieces)
    wanted = next(iter(network.runner().run(image()).values()))
    found = next(iter(stretched(network, 4.0).runner().run(image()).values()))
    # Roundings of float32 grow with the size of what is added up.
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale)


def test_a_residual_stream_is_one_group():
    groups = scale_map(chain().graph(), chain().tensors()).groups
    assert [group.count for group in groups] == [6, 6]
    stream = groups[0]
    first, second, third, head = (layer.name for layer in chain().layers())
    assert [written.layer.name for written in stream.writes] == [first, third]
    assert [read.layer.name for read in stream.reads] == [second, head]


@pytest.mark.parametrize("op_type", ["Sigmoid", "HardSwish", "Clip", "Softmax", "Gelu"])
def test_what_does_not_commute_keeps_its_scale(op_type: str):
    carrier = graph(
        f"""g (float[N, 4] x) => (float[N, 3] y) {{
            a = MatMul (x, first.weight)
            b = {op_type} (a)
            y = MatMul (b, second.weight)
        }}""",
        {"first.weight": noise(4, 5), "second.weight": noise(5, 3)},
    )
    found = scale_map(carrier.graph(), carrier.tensors())
    assert not found.groups
    assert found.reason


@pytest.mark.parametrize("outside", [0.0, 3.0])
def test_what_lies_outside_of_an_image_has_its_own_scale(outside: float):
    carrier = graph(
        f"""g (float[N, 4, 6, 6] x) => (float[N, 3, 6, 6] y) {{
            a = Conv (x, first.weight)
            b = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize",
                        extrapolation_value = {outside}> (a, beyond, twice)
            y = Conv (b, second.weight)
        }}""",
        {"first.weight": noise(5, 4, 1, 1), "second.weight": noise(3, 5, 1, 1)}
        | {"beyond": np.float32([0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5])}
        | {"twice": np.float32([1, 1, 1, 1])},
    )
    assert bool(scale_map(carrier.graph(), carrier.tensors()).groups) is (outside == 0)


def test_a_layer_norm_takes_factors():
    carrier = graph(
        """g (float[N, 4, 5] x) => (float[N, 4, 3] y) {
            a = MatMul (x, first.weight)
            b = LayerNormalization (a, scale, bias)
            y = MatMul (b, second.weight)
        }""",
        {"first.weight": noise(5, 5), "scale": noise(5), "bias": noise(5)}
        | {"second.weight": noise(5, 3)},
    )
    (group,) = scale_map(carrier.graph(), carrier.tensors()).groups
    assert {vector.name for vector in group.vectors} == {"scale", "bias"}
    assert [read.layer.name for read in group.reads] == ["second"]


def test_parameters_that_may_not_change_keep_a_group_as_it_is():
    carrier = chain()
    weights = set(carrier.tensors())
    assert len(scale_map(carrier.graph(), weights).groups) == 2
    last = carrier.layers()[-1].weight
    assert len(scale_map(carrier.graph(), weights - {last}).groups) == 1


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid"])
def test_values_without_an_axis_of_samples_keep_their_scale(activation: str):
    carrier = graph(
        f"""g (float[4] x) => (float[3] y) {{
            a = MatMul (x, first.weight)
            b = {activation} (a)
            y = MatMul (b, second.weight)
        }}""",
        {"first.weight": noise(4, 5), "second.weight": noise(5, 3)},
    )
    declared = {"layers": [{"match": "*"}], "activations": {"observer": "mse"}}
    step = QuantizeStatic.model_validate(declared, strict=False)
    requests = step.survey(carrier, PassContext()).requests
    assert {request.observer for request in requests} == {"mse", "second-moment"}
