"""``cluster``: the same weights on every carrier and in every artifact, folded by the runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor import catalog
from compressor.calibration.collect import collect
from compressor.errors import ModelError, SpecError
from compressor.graph.codebooks import codebook_of
from compressor.graph.costs import layer_bytes, model_bytes, model_parameters
from compressor.lab.inspect.path import inspect_path
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.cluster import Cluster, ClusterRule
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Batch
from tests.compressor.passes.quantize.small_models import (
    digits,
    graph,
    images,
    noise,
    optimized_ops,
    parity_db,
    run_plainly,
    tokens,
    transformer,
)

PLAIN = PassContext()
CONTEXT = ExportContext("test", "0" * 64)
CASES = [{"bits": 4}, {"bits": 1}, {"bits": 2, "group_rows": 7}, {"bits": 5, "group_rows": 1}]
MODELS = [(digits, images), (transformer, tokens)]


@cache
def applied(carrier: Carrier, **options: Any) -> Outcome:
    """Cluster a model once for all tests; nobody changes a carrier."""
    return Cluster(**options).apply(carrier, PLAIN, {})


@cache
def as_onnx(model: Callable[[], Carrier]) -> OnnxCarrier:
    return OnnxCarrier(model().graph())


def dequantized(source: Carrier, after: Carrier) -> Carrier:
    """The float model with each clustered weight replaced by what its codes stand for."""
    known = after.graph().graph.initializers
    changes = {}
    for layer in source.layers():
        book = codebook_of(known[layer.weight])
        if book is None:
            continue
        table, codes = (
            np.asarray(v.const_value.numpy()) for v in (book.table, known[layer.weight])
        )  # type: ignore[union-attr]
        places = codes.astype(np.int64)
        if book.offsets is not None:
            places = places + np.asarray(book.offsets.const_value.numpy())  # type: ignore[union-attr]
        changes[layer.weight] = torch.from_numpy(table[places])
    return source.with_weights(changes)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(("model", "batch"), MODELS)
def test_the_graph_computes_what_the_codes_stand_for(
    model: Callable[[], Carrier], batch: Callable[[], Batch], options: dict[str, Any]
) -> None:
    source = model()
    outcome = applied(source, **options)
    wanted = dequantized(source, outcome.carrier)
    assert parity_db(wanted, outcome.carrier, batch()) == float("inf")
    layers = {layer.name: layer for layer in source.layers()}
    for row in outcome.layers:
        layer = layers[row.name]
        new = layer.canonical(wanted.weight(layer))
        step = options.get("group_rows") or layer.rows
        exact = bool((new == layer.canonical(source.weight(layer))).all())
        assert (row.weight_sqnr_db is None) == exact
        for start in range(0, layer.rows, step):
            assert new[start : start + step].unique().numel() <= 2 ** options["bits"]
    assert {r.scheme.partition("/")[0] for r in outcome.layers} == {f"cluster{options['bits']}"}
    assert [x.name for x in outcome.carrier.layers()] == list(layers)


@pytest.mark.parametrize("options", CASES)
def test_carriers_agree(options: dict[str, Any]) -> None:
    source = transformer()
    module, model = applied(source, **options), applied(as_onnx(transformer), **options)
    for layer in source.layers():
        assert torch.equal(module.carrier.weight(layer), model.carrier.weight(layer))
    assert module.layers == model.layers


@pytest.mark.parametrize("options", CASES)
def test_a_runtime_folds_the_lookup(options: dict[str, Any], tmp_path: Path) -> None:
    carrier = transformer()
    plain = optimized_ops(carrier, tmp_path)
    found = optimized_ops(applied(carrier, **options).carrier, tmp_path)
    for operator in ("Cast", "Gather", "Add"):
        assert found.count(operator) == plain.count(operator)


@pytest.mark.parametrize("options", [*CASES, {"bits": 3}])
@pytest.mark.parametrize(
    ("format", "model", "batch"),
    [("onnx", transformer, tokens), ("safetensors", digits, images)],
    ids=["onnx", "safetensors"],
)
def test_artifacts_hold_it(
    format: str,
    model: Callable[[], Carrier],
    batch: Callable[[], Batch],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    step, source = Cluster(**options), model()
    after = applied(source, **options).carrier
    exporter = catalog.load("exporter", format)()
    exporter.check(after)
    files = exporter.write(after, tmp_path, CONTEXT)
    size = sum(file.stat().st_size for file in files)
    assert abs(exporter.predict(step.preview(source, PLAIN, {})) - size) <= 64
    wanted = next(iter(after.runner().run(batch()).values()))
    got = next(iter(exporter.open(files[0]).run(batch()).values()))
    assert np.abs(got - wanted).max() < 1e-4
    contents = inspect_path(files[0])
    schemes = {row.quantization.partition("/")[0] for row in contents.tensors} - {""}
    assert schemes == {f"cluster{options['bits']}"}
    assert contents.parameters == model_parameters(source)


@pytest.mark.parametrize("model", [digits, transformer])
@pytest.mark.slow
def test_floats_that_remain_are_shortened_on_request(
    model: Callable[[], Carrier], tmp_path: Path
) -> None:
    """Codebooks and vectors keep 8 significant bits on each carrier; an archive is smaller."""
    source, bits = model(), 8
    plain, short = applied(source), applied(source, float_bits=bits)
    other = applied(OnnxCarrier(source.graph()), float_bits=bits)
    weights = {layer.weight for layer in source.layers()}
    changed = 0
    for name, stored in source.tensors().items():
        before, after = stored.read(), short.carrier.tensors()[name].read()
        if name in weights or before.ndim != 1 or not before.is_floating_point():
            continue
        assert torch.equal(after, other.carrier.tensors()[name].read()), name
        assert not (after.view(torch.int32) & 0xFFFF).any(), name
        assert bool(((after - before).abs() <= before.abs() * 2.0**-bits).all()), name
        changed += not torch.equal(after, before)
    assert changed
    known = short.carrier.graph().graph.initializers
    for layer in source.layers():
        book = codebook_of(known[layer.weight])
        if book is not None:
            table = np.asarray(book.table.const_value.numpy())  # type: ignore[union-attr]
            assert not (table.view(np.int32) & 0xFFFF).any()
    exporter, sizes = catalog.load("exporter", "archive")(), []
    for place, outcome in enumerate((plain, short)):
        folder = tmp_path / str(place)
        folder.mkdir()
        (path,) = exporter.write(outcome.carrier, folder, CONTEXT)
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0]


def test_nothing_is_clustered_for_a_plan() -> None:
    class Unread(OnnxCarrier):
        def weight(self, layer: object) -> torch.Tensor:  # noqa: ARG002
            raise AssertionError("a weight was read")

    source = digits()
    step = Cluster(bits=3, group_rows=5)
    preview = step.preview(Unread(source.graph()), PLAIN, {})
    after = applied(source, bits=3, group_rows=5).carrier
    assert layer_bytes(preview) == layer_bytes(after)
    assert model_bytes(preview) == model_bytes(after)
    assert model_parameters(after) == model_parameters(source)


def test_it_is_saved_and_restored(tmp_path: Path) -> None:
    for name, source in (("module", digits()), ("graph", as_onnx(digits))):
        after = applied(source, bits=4, group_rows=5).carrier
        (tmp_path / name).mkdir()
        after.save(tmp_path / name)
        restored = source.restore(tmp_path / name)
        assert parity_db(after, restored, images()) == float("inf")
        for layer in source.layers():
            assert torch.equal(after.weight(layer), restored.weight(layer))


def test_an_exported_file_is_opened_again(tmp_path: Path) -> None:
    after = applied(digits(), bits=4, group_rows=5).carrier
    (path,) = catalog.load("exporter", "onnx")().write(after, tmp_path, CONTEXT)
    opened = open_onnx(path, 21)
    assert parity_db(after, opened, images()) > 120
    assert all(codebook_of(opened.graph().graph.initializers[x.weight]) for x in opened.layers())
    with pytest.raises(SpecError, match="touches no layer: 7 of 7: its weight is uint4 already"):
        Cluster().survey(opened, PLAIN)


@pytest.mark.parametrize("step", [Fuse(), QuantizeDynamic(), Cast(), Cluster(bits=2)])
def test_later_passes_keep_it(step: Any) -> None:
    source = transformer()
    names = [x.name for x in source.layers() if x.name.endswith("qkv")]
    rules = tuple(ClusterRule(match=name, skip=True) for name in names)
    after = applied(source, layers=rules).carrier
    later = step.apply(after, PLAIN, {}).carrier
    count = sum(codebook_of(v) is not None for v in after.graph().graph.initializers.values())
    kept = sum(codebook_of(v) is not None for v in later.graph().graph.initializers.values())
    assert kept == count + (2 if isinstance(step, Cluster) else 0)
    assert parity_db(after, later, tokens()) > 12


def test_batch_norms_are_not_folded_into_codes() -> None:
    after = applied(digits()).carrier
    reasons = {row.name: row.reason for row in Fuse().survey(after, PLAIN).layers}
    assert reasons["stem"] == "batch-norm bn stays: the weight is quantized or computed"
    fused = Fuse().apply(after, PLAIN, {}).carrier
    assert [x.dtype for x in fused.layers()] == [x.dtype for x in after.layers()]


def test_zeros_are_kept_and_counted(tmp_path: Path) -> None:
    source = digits()
    pruned = source.with_weights(
        {
            x.weight: torch.where(source.weight(x).abs() < 0.05, 0.0, source.weight(x))
            for x in source.layers()
        }
    )
    after = applied(pruned, group_rows=16).carrier
    wanted = dequantized(pruned, after)
    files = catalog.load("exporter", "safetensors")().write(after, tmp_path, CONTEXT)
    counted = {row.name: row.zeros for row in inspect_path(files[0]).tensors}
    for layer in source.layers():
        zeros = pruned.weight(layer) == 0
        new = wanted.weight(layer)
        assert bool((new[zeros] == 0).all())
        share = 100 * float((new == 0).double().mean())
        assert counted[layer.weight] == pytest.approx(share)


def test_kernels_of_transposed_convolutions_and_stored_transposes() -> None:
    text = """
    net (float[2, 4, 5, 5] x) => (float[2, 10] y) {
        up = ConvTranspose<kernel_shape = [3, 3], group = 2>(x, k)
        mean = ReduceMean<keepdims = 0>(up, axes)
        y = MatMul(mean, w)
    }"""
    weights = {"k": noise(4, 3, 3, 3), "w": noise(6, 10, seed=1), "axes": np.array([2, 3])}
    carrier = graph(text, weights)
    after = applied(carrier, bits=3).carrier
    batch = {"x": noise(2, 4, 5, 5, seed=3)}
    wanted = run_plainly(dequantized(carrier, after), batch)["y"]
    assert np.array_equal(run_plainly(after, batch)["y"], wanted)
    rows = {r.name: r for r in Cluster(bits=3, group_rows=2).survey(carrier, PLAIN).layers}
    assert "two axes" in rows["k"].reason
    after = applied(carrier, bits=3, group_rows=4).carrier
    wanted = run_plainly(dequantized(carrier, after), batch)["y"]
    assert np.array_equal(run_plainly(after, batch)["y"], wanted)


def test_rules_of_layers() -> None:
    rules = (
        ClusterRule(match="stem", skip=True),
        ClusterRule(match="head", bits=8, group_rows="tensor"),
    )
    survey = Cluster(bits=2, group_rows=16, layers=rules).survey(digits(), PLAIN)
    actions = {row.name: row.action for row in survey.layers}
    assert actions["stem"] == "keep"
    assert actions["head"] == "cluster8/tensor"
    assert actions["block1.conv1"] == "cluster2/rows 16"
    with pytest.raises(SpecError, match="'nothing': matches no layer"):
        Cluster(layers=(ClusterRule(match="nothing"),)).survey(digits(), PLAIN)


def test_important_inputs_count_more() -> None:
    source = transformer()
    step = Cluster(bits=2, importance=True)
    survey = step.survey(source, PLAIN)
    assert {request.observer for request in survey.requests} == {"column-norm"}
    runner = source.runner([request.tensor for request in survey.requests])
    found = collect(runner.run, [tokens()], survey.requests, lambda _: None)
    weighted = step.apply(source, PLAIN, found).carrier
    plain = applied(source, bits=2).carrier
    assert parity_db(source, weighted, tokens()) > parity_db(source, plain, tokens())


def test_a_convolution_is_weighted_patch_by_patch() -> None:
    source = digits()
    step = Cluster(bits=2, importance=True)
    survey = step.survey(source, PLAIN)
    runner = source.runner([r.tensor for r in survey.requests if r.tensor != "image"])
    found = collect(
        lambda batch: {**batch, **runner.run(batch)},
        [images(64)],
        survey.requests,
        lambda _: None,
    )
    weighted = step.apply(source, PLAIN, found).carrier
    plain = applied(source, bits=2).carrier
    assert parity_db(source, weighted, images(64)) > parity_db(source, plain, images(64))


def test_layers_whose_input_nobody_sees_say_so() -> None:
    text = """
    net (float[2, 3, 8] x) => (float[2, 4, 6] z) {
        y = Conv(x, k)
        z = MatMul(y, w)
    }"""
    carrier = graph(text, {"k": noise(4, 3, 1), "w": noise(8, 6)})
    rows = Cluster(importance=True).survey(carrier, PLAIN).layers
    assert "count alike" in next(row.reason for row in rows if row.name == "k")
    alone = graph(
        "n (float[2, 3, 8] x) => (float[2, 4, 8] y) { y = Conv(x, k) }", {"k": noise(4, 3, 1)}
    )
    with pytest.raises(SpecError, match="finds no layer whose input it can see"):
        Cluster(importance=True).survey(alone, PLAIN)


def test_weights_that_are_not_finite_are_refused() -> None:
    source = digits()
    bad = source.weight(source.layers()[0]).clone()
    bad.view(-1)[3] = float("nan")
    with pytest.raises(ModelError, match="layer 'stem': its weight holds values that are NaN"):
        applied(source.with_weights({"stem.weight": bad}))


@pytest.mark.parametrize(
    ("target", "words"), [("tensorrt", "target tensorrt"), ("compressed-tensors", "layout")]
)
def test_targets_without_codebooks_are_refused(target: str, words: str) -> None:
    context = PassContext(targets=frozenset({target}))
    with pytest.raises(
        SpecError, match=f"'stem': would be cluster4/tensor, and .*{words}.* has no"
    ):
        Cluster().survey(digits(), context)


def test_a_bare_checkpoint_has_no_graph(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "m.safetensors")
    carrier = open_checkpoint(tmp_path / "m.safetensors")
    assert not Cluster().required <= carrier.offers
    with pytest.raises(SpecError, match="weights only"):
        carrier.graph()
