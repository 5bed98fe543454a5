"""The pass ``equalize``, and ``prepare: auto`` of ``quantize-static``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.calibration.collect import collect_statistics
from compressor.errors import SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.prepare.equalize import Equalize
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.passes import GraphPass, Outcome, PassContext
from compressor.types.tensors import Array, Batch
from tests.compressor.passes.prepare.networks import chain, image, scaled_layers, stretched
from tests.compressor.passes.quantize.small_models import graph, noise
from tests.compressor.passes.quantize.static_models import ORT, Given
from tests.two_linears import drawn, on_onnx, on_torch

BATCHES = [image(seed) for seed in range(8)]
SCALE = 16.0
NOTHING_GAINED = "nothing was scaled: no factors lower the predicted error by half a decibel"


INTEGERS = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)


def applied(declared: GraphPass, carrier: Carrier, batches: list[Batch] = BATCHES) -> Outcome:
    context = replace(ORT, samples=Given(batches))
    requests = declared.survey(carrier, context).requests
    statistics = collect_statistics(carrier, batches, requests)
    return declared.apply(carrier, context, statistics)


def output(carrier: Carrier) -> Array:
    return next(iter(carrier.runner().run(image(99, 16)).values()))


def sqnr(carrier: Carrier, outcome: Outcome) -> float:
    wanted, found = output(carrier), output(outcome.carrier)
    return float(10 * np.log10(np.square(wanted).sum() / np.square(wanted - found).sum()))


@pytest.mark.parametrize("observer", ["auto", "min-max"])
def test_scaled_values_reach_as_far_as_in_samples_that_are_not_run_again(observer: str):
    """Every second of 128 samples is run again, and the largest is not among them."""
    batches = [image(seed, 1) for seed in range(128)]
    batches[1] = {name: 8 * array for name, array in batches[1].items()}
    declared = QuantizeStatic.model_validate(
        {"layers": [{"match": "*"}], "activations": {"observer": observer}}, strict=False
    )
    network = stretched(chain(), SCALE)
    outcome = applied(declared, network, batches)
    assert any(row.details for row in outcome.layers)
    (wanted,) = network.runner().run(batches[1]).values()
    (found,) = outcome.carrier.runner().run(batches[1]).values()
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - found).sum()) > 30


def test_channels_of_uneven_size_are_scaled_and_the_function_stays():
    network = stretched(chain(), SCALE)
    outcome = applied(Equalize(), network)
    wanted = output(network)
    np.testing.assert_allclose(
        output(outcome.carrier), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()
    )
    first, second, third, head = (layer.name for layer in network.layers())
    gains = {row.name: row.details["equalized_db"] for row in outcome.layers if row.details}
    assert gains.keys() == {second, third, head}
    assert min(gains.values()) > 5
    assert scaled_layers(network, outcome, image(99)) == {first, second, third}
    (note,) = outcome.notes
    assert note.startswith("channels of 2 groups of layers were scaled")


def test_what_is_scaled_already_is_not_scaled_again():
    once = applied(Equalize(), stretched(chain(), SCALE)).carrier
    twice = applied(Equalize(), once)
    assert twice.carrier is once
    assert twice.notes == (NOTHING_GAINED,)


def test_the_plan_says_what_will_be_scaled():
    network = chain()
    rows = {row.name: row for row in Equalize().survey(network, PassContext()).layers}
    actions = [rows[layer.name].action for layer in network.layers()]
    assert actions == [
        "scale output channels",
        "scale input and output channels",
        "scale input and output channels",
        "scale input channels",
    ]
    first, second, _, _ = names = [layer.name for layer in network.layers()]
    stream = "through Relu, Add and ReduceMean"
    assert [rows[name].remark for name in names] == [
        stream,
        f"input with {first} {stream}; output through Relu",
        f"input with {second} through Relu; output with {first} {stream}",
        f"with {first} {stream}",
    ]
    (static, *_) = INTEGERS.survey(network, PassContext()).layers
    assert static.remark == f"may scale output channels: {stream}"


def test_a_layer_that_keeps_its_scale_says_why():
    carrier = graph(
        """g (float[N, 4] x) => (float[N, 4] y) {
            a = MatMul (x, first.weight)
            b = Relu (a)
            c = MatMul (b, second.weight)
            d = Sigmoid (c)
            y = MatMul (d, third.weight)
        }""",
        {"first.weight": noise(4, 8), "second.weight": noise(8, 4), "third.weight": noise(4, 4)},
    )
    rows = {row.name: row for row in Equalize().survey(carrier, PassContext()).layers}
    assert not rows["third"].touched
    assert rows["third"].reason == (
        "none of its channels can be scaled: Sigmoid does not commute with factors; an output of "
        "the model keeps its scale"
    )


@pytest.mark.parametrize("declared", [Equalize, QuantizeStatic])
def test_a_skipped_layer_keeps_its_weight(declared: type[GraphPass]):
    network = stretched(chain(), SCALE)
    first, second, third, head = network.layers()
    rules = [{"match": head.name, "skip": True}, {"match": "*"}]
    step = declared.model_validate({"layers": rules}, strict=False)
    outcome = applied(step, network)
    assert scaled_layers(network, outcome, image(99)) == {second.name}
    assert {row.name for row in outcome.layers if row.details} == {third.name}
    after = outcome.carrier
    assert torch.equal(network.weight(head), after.tensors()[head.weight].read())
    if declared is Equalize:
        assert torch.equal(network.weight(first), after.weight(first))


def test_a_model_that_has_nothing_to_scale_is_an_error():
    carrier = graph(
        "g (float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, only.weight) }",
        {"only.weight": noise(4, 3)},
    )
    with pytest.raises(SpecError, match=r"touches no layer.*none of its channels can be scaled"):
        Equalize().survey(carrier, PassContext())


def test_quantization_says_that_a_model_has_nothing_to_scale():
    carrier = graph(
        "g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) { y = Conv (x, only.weight) }",
        {"only.weight": noise(4, 3, 3, 3)},
    )
    survey, alone = (
        declared.survey(carrier, PassContext())
        for declared in (INTEGERS, INTEGERS.model_copy(update={"prepare": "none"}))
    )
    (note,) = set(survey.notes) - set(alone.notes)
    assert note == "no channels can be scaled: an input of the model keeps its scale"


def test_layers_whose_outputs_all_but_vanish():
    """The inverse of their power is more than a float32 holds: that was an internal error."""
    carrier = graph(
        """g (float[N, 3, 6, 6] image) => (float[N, 4, 2, 2] y) {
            a = Conv (image, first.weight)
            b = Relu (a)
            y = Conv (b, second.weight)
        }""",
        {"first.weight": noise(4, 3, 3, 3), "second.weight": noise(4, 4, 3, 3)},
    )
    faint = [{name: array * np.float32(1e-21) for name, array in b.items()} for b in BATCHES]
    assert len(applied(INTEGERS, carrier, faint).layers) == 2


# With 8 bits and no rules, all but the first layer are stored as codes and computed as floats.
@pytest.mark.parametrize(("bits", "rules"), [(8, [{"match": "*"}]), (8, []), (4, [])])
def test_a_stretched_network_is_quantized_as_well_as_before(bits: int, rules: list[dict[str, str]]):
    network = chain()
    uneven = stretched(network, SCALE)
    options = {"weights": {"bits": bits}, "layers": rules}
    declared = QuantizeStatic.model_validate(options, strict=False)
    alone = declared.model_copy(update={"prepare": "none"})
    even = sqnr(network, applied(declared, network))
    assert sqnr(uneven, applied(declared, uneven)) > even - 2
    assert sqnr(uneven, applied(alone, uneven)) < even - 8


def test_an_even_network_keeps_the_bytes_that_it_has_without():
    even = applied(Equalize(), stretched(chain(), SCALE)).carrier
    alone = INTEGERS.model_copy(update={"prepare": "none"})
    outcome = applied(INTEGERS, even)
    assert outcome.notes[0] == NOTHING_GAINED
    first, second = outcome.carrier, applied(alone, even).carrier
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor.read(), second.tensors()[name].read()), name


def test_weights_that_were_codes_before_stay_as_they_are():
    network = stretched(chain(), SCALE)
    codes = {}
    for layer in network.layers():
        matrix = layer.canonical(network.weight(layer))
        codes[layer.weight] = layer.stored((matrix * 127 / matrix.abs().amax()).round() / 8)
    outcome = applied(QuantizeStatic(), network.with_weights(codes))
    assert outcome.rescale is None


def test_module_and_file_get_the_same_factors(tmp_path: Path):
    weights = drawn(12, 16, 5)
    factors = torch.exp2(torch.linspace(-4, 4, 16))
    weights["up.weight"] /= factors[:, None]
    weights["up.bias"] /= factors
    weights["down.weight"] *= factors
    batches = [{"x": noise(32, 12, seed=seed)} for seed in range(4)]
    carriers = [on_torch(weights), on_onnx(weights, tmp_path)]
    results = [applied(Equalize(), carrier, batches).carrier.tensors() for carrier in carriers]
    assert not torch.equal(results[0]["up.weight"].read(), weights["up.weight"])
    for name in ("up.weight", "up.bias", "down.weight"):
        first, second = (result[name].read() for result in results)
        second = second if first.shape == second.shape else second.T
        assert torch.equal(first, second), name


def test_without_a_way_to_observe_again_nothing_is_scaled():
    network = stretched(chain(), SCALE)
    declared = QuantizeStatic()
    requests = declared.survey(network, PassContext()).requests
    statistics = collect_statistics(network, BATCHES, requests)
    outcome = declared.apply(network, PassContext(), statistics)
    assert isinstance(outcome.carrier, OnnxCarrier)
    assert outcome.rescale is None
