"""Quantization-aware training by ``qat``: what is trained, written, resumed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from compressor.errors import CompressorError, ModelError, SpecError
from compressor.exporters import OnnxExporter
from compressor.graph.values import all_nodes
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.train.qat.qat import Qat, QatRule
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome
from compressor.types.tensors import Batch
from tests.compressor.passes.train.small_qat import (
    CONTEXT,
    TENSORRT,
    Block,
    block,
    chosen,
    material,
    module_outputs,
    outputs,
    quantized,
    trained_module,
)
from tests.compressor.passes.train.small_training import INPUTS, SmallData
from tests.compressor.passes.train.test_finetune import Killed, ending_at

FOUR: dict[str, Any] = {"weights": {"bits": 4}, "activations": {"bits": 4}}
IMAGES = SmallData(400).images


def tensors(carrier: Carrier) -> dict[str, bytes]:
    """Return every initializer's bytes."""
    found = {}
    for name, value in carrier.graph().graph.initializers.items():
        assert value.const_value is not None
        found[name] = value.const_value.tobytes()
    return found


def operators(carrier: Carrier) -> list[str]:
    return [node.op_type for node in all_nodes(carrier.graph().graph)]


@pytest.mark.parametrize("norms", ["folded", "live"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        FOUR,
        {"weights": {"bits": 2}},
        {"weights": {"symmetric": False, "granularity": "tensor"}},
        {"activations": {"symmetric": True}},
        {"scales": "fixed"},
        {**FOUR, "layers": ({"match": "stem", "bits": 8, "activation_bits": 8},)},
    ],
)
def test_what_is_written_computes_what_was_trained(
    tmp_path: Path, options: dict[str, Any], norms: str
) -> None:
    prepared, carrier = trained_module(tmp_path, block(), chosen(batch_norm=norms, **options))
    trained, ran = module_outputs(prepared, IMAGES), outputs(carrier, IMAGES)
    assert np.mean(trained.argmax(1) == ran.argmax(1)) >= 0.995
    # A code next to a tie may fall to either side; beside that the two are the same.
    same = np.isclose(trained, ran, atol=1e-5 * np.abs(trained).max()).all(axis=1)
    assert np.mean(same) > 0.97


class Pixels:
    """Eight-bit images, each channel normalized in a way of its own, as data of a training."""

    target: str | None = "label"
    digest = "pixels"
    random = False
    samples = 40

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        levels = rng.integers(0, 256, (self.samples, 2, 6, 6))
        levels[0, :, 0, :2] = [0, 255]
        mean, std = np.array([0.4, 0.5])[:, None, None], np.array([0.2, 0.3])[:, None, None]
        self.images = ((levels / 255 - mean) / std).astype(np.float32)
        self.labels = levels[:, 0].mean((1, 2)).argsort().argsort() * 3 // self.samples

    def batch(self, rows: Any, seed: Any) -> dict[str, Any]:
        del seed
        return {"x": self.images[rows], "label": self.labels[rows]}

    made_up = False

    def probe(self, count: int) -> dict[str, Any]:
        return {"x": self.images[:count]}

    def batches(self) -> Any:
        yield {"x": self.images}


def test_pixels_stay_exact(tmp_path: Path) -> None:
    data, start = Pixels(), block()
    given = type(material(tmp_path, start))(
        **{**vars(material(tmp_path, start)), "data": data, "samples": data}
    )
    declared = chosen(batch_norm="live")
    prepared = declared.prepared(start, CONTEXT, given)
    assert prepared.points.weights["stem"].grid is not None
    assert "x" not in prepared.points.activations
    with torch.no_grad():  # batches of training move the statistics of batch norms
        prepared.module.train()(x=torch.from_numpy(data.images))
    state = {name: t.detach() for name, t in prepared.module.state_dict().items()}
    graph, _ = prepared.written(state)
    prepared.module.eval()
    trained = module_outputs(prepared, data.images)
    ran = outputs(start.with_graph(graph), data.images)
    assert any(name.endswith("_levels") for name in (v.name or "" for v in _values(graph)))
    same = np.isclose(trained, ran, atol=1e-5 * np.abs(trained).max()).all(axis=1)
    assert np.mean(same) > 0.9


def _values(graph: ir.Model) -> list[ir.Value]:
    return [value for node in all_nodes(graph.graph) for value in node.outputs]


def loss_after(outcome: Outcome) -> float:
    return float(outcome.notes[0].split()[3])


def test_learned_scales_fit_better_than_fixed_ones(tmp_path: Path) -> None:
    options: dict[str, Any] = {**FOUR, "steps": 60, "data": SmallData(noisy=False)}
    options["activations"] = {"bits": 4, "observer": "min-max"}
    learned = quantized(tmp_path / "learned", **options)
    fixed = quantized(tmp_path / "fixed", scales="fixed", **options)
    assert loss_after(learned) < loss_after(fixed)


def test_fixed_scales_are_those_of_calibration(tmp_path: Path) -> None:
    start = block()
    before = chosen(scales="fixed").prepared(start, CONTEXT, material(tmp_path / "a", start))
    after = quantized(tmp_path / "b", scales="fixed", learning_rate=0.001).carrier
    held = after.graph().graph.initializers
    for name, point in before.points.activations.items():
        value = held[f"{name}_scale"].const_value
        assert value is not None
        assert float(value.numpy()) == np.float32(point.scale)
    moved = quantized(tmp_path / "c", learning_rate=0.001).carrier.graph().graph.initializers
    for name in before.points.activations:
        value, other = moved[f"{name}_scale"].const_value, held[f"{name}_scale"].const_value
        assert value is not None
        assert other is not None
        assert value.numpy() != other.numpy()


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("killed", {**FOUR, "batch_norm": "live"}),
        ("interrupted", {}),
        pytest.param("killed", {}, marks=pytest.mark.slow),
        pytest.param("interrupted", {**FOUR, "batch_norm": "live"}, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_training_ends_in_the_same_bytes(
    tmp_path: Path, options: dict[str, Any], how: str
) -> None:
    options = {**options, "save_every": 3, "validation": 0.2}
    whole = quantized(tmp_path / "whole", **options)
    folder = tmp_path / "broken"
    with pytest.raises(Killed if how == "killed" else KeyboardInterrupt):
        quantized(folder, **options, stage=ending_at(8, how))
    resumed = quantized(folder, **options)
    saved = 6 if how == "killed" else 8
    assert f"resumed from the state saved after step {saved}" in resumed.notes
    assert tensors(resumed.carrier) == tensors(whole.carrier)


def test_training_wins_back_what_four_bits_lose(tmp_path: Path) -> None:
    start = block()
    weak = {**FOUR, "weights": {"bits": 2}}
    before = chosen(**weak).prepared(start, CONTEXT, material(tmp_path / "a", start))
    before.module.eval()
    data = SmallData(noisy=False)
    outcome = quantized(tmp_path / "b", start, **weak, steps=80)
    right = [
        float(np.mean(found.argmax(1) == data.labels))
        for found in (
            module_outputs(before, data.images),
            outputs(outcome.carrier, data.images),
        )
    ]
    assert right[1] > right[0] + 0.2


def test_weights_become_integers_of_the_wanted_width(tmp_path: Path) -> None:
    rules = ({"match": "stem", "bits": 8}, {"match": "conv", "granularity": "tensor"})
    outcome = quantized(tmp_path, weights={"bits": 2}, layers=rules)
    found = {layer.name: layer for layer in outcome.carrier.layers()}
    assert [layer.scheme for layer in outcome.layers] == [
        "int8/channel",
        "int2/tensor",
        "int2/channel",
    ]
    codes = outcome.carrier.weight(found["fc"])
    assert set(codes.flatten().tolist()) <= {-2, -1, 0, 1}
    assert outcome.carrier.weight(found["stem"]).abs().max() > 30


def test_skipped_layers_stay_as_they_are(tmp_path: Path) -> None:
    start = block()
    outcome = quantized(tmp_path, start, layers=({"match": "fc", "skip": True},))
    after = {layer.name: layer for layer in outcome.carrier.layers()}["fc"]
    assert after.dtype == "float32"
    weight = torch.as_tensor(outcome.carrier.weight(after))
    assert torch.equal(after.canonical(weight), start.module.state_dict()["fc.weight"])
    rows = {
        row.name: row
        for row in chosen(layers=({"match": "fc", "skip": True},)).survey(start, CONTEXT).layers
    }
    assert rows["fc"].action == "keep"
    assert rows["stem"].action == "int8/channel x uint8, trained"


def test_pruned_weights_stay_zero(tmp_path: Path) -> None:
    start = block()
    weight = start.module.state_dict()["conv.weight"].clone()
    weight[::2] = 0
    outcome = quantized(tmp_path, start.with_weights({"conv.weight": weight}), weight_decay=0.1)
    layer = {found.name: found for found in outcome.carrier.layers()}["conv"]
    codes = outcome.carrier.weight(layer)
    assert not codes[::2].any()
    assert codes[1::2].any()


@pytest.mark.parametrize("left", ["fc", "conv"])
def test_later_passes_take_the_result(tmp_path: Path, left: str) -> None:
    start = block()
    carrier = quantized(tmp_path, start, layers=({"match": left, "skip": True},)).carrier
    fused = Fuse().apply(carrier, CONTEXT, {}).carrier
    assert outputs(fused, IMAGES) == pytest.approx(outputs(carrier, IMAGES), abs=1e-5)
    after = _static(fused, {"stem", "conv", "fc"} - {left})
    assert {layer.name: layer.dtype for layer in after.layers()} == dict.fromkeys(
        ("stem", "conv", "fc"), "int8"
    )
    for node in all_nodes(after.graph().graph):
        if node.op_type == "QuantizeLinear":  # no value is quantized a second time
            maker = node.inputs[0].producer() if node.inputs[0] is not None else None
            assert maker is None or maker.op_type != "DequantizeLinear"
    agree = outputs(after, IMAGES).argmax(1) == outputs(carrier, IMAGES).argmax(1)
    assert np.mean(agree) > 0.95
    with pytest.raises(SpecError, match="touches no layer: 3 of 3: it is quantized already"):
        QuantizeStatic().survey(after, CONTEXT)
    assert "nothing to fuse" in Fuse().survey(after, CONTEXT).notes[0]


def _static(carrier: Carrier, done: set[str]) -> Carrier:
    from compressor.calibration.collect import collect

    declared = QuantizeStatic()
    survey = declared.survey(carrier, CONTEXT)
    kept = {row.name: row.reason for row in survey.layers if not row.touched}
    assert kept == dict.fromkeys(done, "it is quantized already")
    taps = [t for request in survey.requests for t in request.tensors if t != "x"]
    runner = carrier.runner(taps)

    def run(batch: Batch) -> Batch:
        return {**batch, **runner.run(batch)}

    found = collect(run, [{"x": SmallData(64).images}], survey.requests)
    return declared.apply(carrier, CONTEXT, found).carrier


def test_the_preview_has_the_structure_and_bytes_of_the_result(tmp_path: Path) -> None:
    start, declared = block(), chosen(**FOUR)
    planned = declared.preview(start, CONTEXT, {})
    after = quantized(tmp_path, start, **FOUR).carrier
    assert operators(planned) == operators(after)
    exporter = OnnxExporter(opset=21, target="ort-cpu")
    assert exporter.predict(planned) == exporter.predict(after)


def test_batch_norms_are_frozen_at_their_step(tmp_path: Path) -> None:
    def statistics(share: float) -> Tensor:
        declared = chosen(batch_norm="live", freeze_batch_norm=share, learning_rate=1e-30)
        prepared, _ = trained_module(tmp_path / str(share), block(), declared)
        return prepared.graph.get_buffer("bn1.running_mean").clone()

    before = block().module.state_dict()["bn1.running_mean"]
    assert torch.equal(statistics(0.0), before)
    assert not torch.equal(statistics(0.5), before)
    assert not torch.equal(statistics(1.0), statistics(0.5))


def test_tensorrt_gets_zero_points_of_zero(tmp_path: Path) -> None:
    carrier = quantized(tmp_path, context=TENSORRT).carrier
    for node in all_nodes(carrier.graph().graph):
        if node.op_type == "QuantizeLinear":
            zero = node.inputs[2]
            assert zero is not None
            assert zero.const_value is not None
            assert not zero.const_value.numpy().any()
            assert zero.dtype == ir.DataType.INT8


class Unknown(nn.Module):
    """Has an operator that PyTorch graphs are not executed with."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, 6, 6]`` to logits."""
        found: Tensor = torch.relu(self.fc(x.flatten(1)))
        return found


def _with_unknown() -> TorchCarrier:
    carrier = TorchCarrier(Unknown(), INPUTS)
    graph = carrier.graph().clone()
    next(node for node in graph.graph if node.op_type == "Relu").domain = "somewhere"
    return TorchCarrier(carrier.module, INPUTS, graph)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "folded", "freeze_batch_norm": 0.5}, "is for batch-norm: live"),
        ({"layers": ({"match": "*", "skip": True},)}, "touches no layer: 3 of 3: skipped by"),
        ({"layers": ({"match": "fd"},)}, "matches no layer"),
        ({"context": TENSORRT, "weights": {"symmetric": False}}, "zero point 0 only"),
        ({"context": TENSORRT, "activations": {"symmetric": False}}, "zero point 0 only"),
        ({"activations": {"percentile": 99.0}}, "the observer is mse"),
        ({"weights": {"bits": 5}}, "Input should be 8, 4, 3 or 2"),
        ({"loss": "hinge"}, "set cross-entropy, mse or package.module:function"),
        ({"carrier": block(norm=False), "batch_norm": "live"}, "no layer is followed by a batch"),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], message: str) -> None:
    carrier = options.get("carrier") or block()
    context = options.get("context", CONTEXT)
    own = {k: v for k, v in options.items() if k not in ("carrier", "context")}
    with pytest.raises((ValueError, CompressorError), match=message):
        chosen(**own).survey(carrier, context)


def test_an_operator_without_a_torch_form_is_named() -> None:
    with pytest.raises(ModelError, match=r"somewhere\.\w+.*not supported on the torch carrier"):
        chosen().survey(_with_unknown(), CONTEXT)


def test_a_quantized_model_is_not_trained(tmp_path: Path) -> None:
    carrier = quantized(tmp_path, steps=1).carrier
    assert Capability.TRAIN in Qat.needs
    assert Capability.TRAIN not in carrier.offers
    with pytest.raises(SpecError, match="train before the passes"):
        carrier.trainable()


def test_other_factors_between_layer_and_norm_are_refused(tmp_path: Path) -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.bn1(self.stem(x)) * 3.0)
            found: Tensor = self.fc((y + self.bn2(self.conv(y))).mean((2, 3)))
            return found

    start = TorchCarrier(Scaled(), INPUTS)
    given = material(tmp_path, start)
    with pytest.raises(SpecError, match=r"another factor .* set batch-norm: folded"):
        chosen(batch_norm="live").prepared(start, CONTEXT, given)
    assert outputs(quantized(tmp_path, start).carrier, IMAGES[:2]).shape == (2, 3)


def test_the_plan_names_layers_that_would_be_faster_as_floats() -> None:
    """A block of eight channels is: calling an integer kernel takes longer than its products."""
    kept, rules = "VNNI with skip: true for 'stem', 'conv'", (QatRule(match="fc", skip=True),)
    assert kept in " ".join(chosen(layers=rules).survey(block(), CONTEXT).notes)
    faster = "VNNI as floats, whose codes quantize-weights stores"
    assert faster in " ".join(chosen().survey(block(), CONTEXT).notes)
    for declared, context in ((chosen(**FOUR), CONTEXT), (chosen(), TENSORRT)):
        assert "predicted latency" not in " ".join(declared.survey(block(), context).notes)
