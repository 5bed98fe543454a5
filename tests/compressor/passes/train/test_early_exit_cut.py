"""Graphs that stop early answer each sample as its own head or the whole network does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compressor
from compressor.errors import ModelError, SpecError
from compressor.exporters import OnnxExporter, SafetensorsExporter
from compressor.graph.blocks import all_initializers
from compressor.graph.costs import macs, parameters
from compressor.lab.inspect.graph import inspect_onnx
from compressor.models.executor import GraphModule
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.torch.matching import TorchRunner
from compressor.passes.train.early_exit.cut import CutExit, cut, part_macs
from compressor.passes.train.early_exit.heads import (
    confidence_name,
    initial_parameters,
    with_confidences,
    with_heads,
)
from compressor.passes.train.early_exit.points import (
    Answer,
    Batches,
    Confidence,
    Exit,
    ExitPoint,
    find_answer,
    find_points,
)
from compressor.passes.train.early_exit.thresholds import check_answers
from compressor.progress import Silent
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext
from compressor.types.tensors import Array, Batch
from tests.compressor.passes.train.early_exit_graphs import (
    crossing_network,
    residual_network,
    token_network,
)

TWO = (Exit(after="b1"), Exit(after="b2", head="norm-linear"))
BATCHES = (1, 3, 8)


@dataclass
class Exits:
    """A network with heads that nobody trained, in both forms."""

    carrier: OnnxCarrier
    options: tuple[Exit, ...] = TWO
    measure: Confidence = "probability"

    def __post_init__(self) -> None:
        graph = self.carrier.graph()
        self.batches = Batches(graph)
        self.answer: Answer = find_answer(graph, self.batches)
        self.points: tuple[ExitPoint, ...] = find_points(
            graph, self.options, self.batches, self.answer
        )
        self.own = [initial_parameters(p, self.answer.classes, 1) for p in self.points]
        heads = with_heads(graph, self.points, self.answer, self.own)
        flat, self.names = with_confidences(heads, self.measure, self.answer)
        self.all_heads = OnnxCarrier(flat).runner()

    def cut(self, *thresholds: float) -> ir.Model:
        """Return the graph that stops early."""
        known = zip(self.points, thresholds, self.own, strict=True)
        exits = [CutExit(*entry) for entry in known]
        return cut(self.carrier.graph(), exits, self.measure, self.batches, self.answer)

    def sure(self, batch: Batch, number: int) -> Array:
        """Return an exit's confidences."""
        return self.all_heads.run(batch)[confidence_name(number)]

    def wanted(self, batch: Batch, *thresholds: float) -> Array:
        """Return for each sample the answer of the exit that it leaves at, or the network's."""
        found = self.all_heads.run(batch)
        rows = []
        for row in range(len(batch["x"])):
            sure = [found[confidence_name(n)][row] for n in range(1, len(thresholds) + 1)]
            left = [n for n, (s, t) in enumerate(zip(sure, thresholds, strict=True)) if s >= t]
            rows.append(found[self.names[left[0] if left else -1]][row])
        return np.stack(rows)


def weights(carrier: Carrier) -> set[str]:
    return set(carrier.graph().graph.initializers)


def images(count: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(count, 2, 6, 6)).astype(np.float32)}


def tokens(count: int) -> Batch:
    rng = np.random.default_rng(1)
    mask = np.where(rng.random((count, 5)) < 0.3, -9.0, 0.0)
    return {
        "x": rng.normal(size=(count, 5, 8)).astype(np.float32),
        "mask": mask.astype(np.float32),
    }


def plain(model: ir.Model) -> OrtRunner:
    """Run a model without optimizing it, which changes the order of sums."""
    return OrtRunner(ir.to_proto(model).SerializeToString(), "model", optimize=False)


def between(values: Array, share: float) -> float:
    """Return a threshold that no value is near to."""
    ranked = np.sort(values.astype(np.float64))
    place = int(share * (len(ranked) - 1))
    return float((ranked[place] + ranked[place + 1]) / 2)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    shares=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    measure=st.sampled_from(["probability", "entropy", "margin"]),
)
def test_residual_networks_answer_each_sample_by_itself(
    seed: int, shares: tuple[float, float], measure: Confidence
) -> None:
    exits = Exits(residual_network(seed), measure=measure)
    batch = images(8, seed)
    thresholds = [between(exits.sure(batch, n), s) for n, s in enumerate(shares, start=1)]
    model = exits.cut(*thresholds)
    early, module = OnnxCarrier(model), GraphModule(model)
    for count in BATCHES:
        part = {"x": batch["x"][:count]}
        wanted = exits.wanted(part, *thresholds)
        np.testing.assert_allclose(early.runner().run(part)["logits"], wanted, atol=1e-5)
        loaded = TorchRunner(module).run(part)["logits"]
        np.testing.assert_allclose(loaded, wanted, atol=1e-5)


@pytest.mark.parametrize("count", BATCHES)
def test_tokens_with_masks_and_shapes_are_cut(count: int) -> None:
    exits = Exits(token_network(), (Exit(after="b1.out"),))
    batch = tokens(8)
    threshold = between(exits.sure(batch, 1), 0.5)
    part = {name: array[:count] for name, array in batch.items()}
    found = OnnxCarrier(exits.cut(threshold)).runner().run(part)["logits"]
    np.testing.assert_allclose(found, exits.wanted(part, threshold), atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_thresholds_out_of_reach_every_bit_is_the_networks(seed: int) -> None:
    exits = Exits(residual_network(seed))
    early, whole = exits.cut(inf, inf), exits.carrier.graph()
    ours, theirs = TorchRunner(GraphModule(early)), TorchRunner(GraphModule(whole))
    for count in BATCHES:
        wanted = theirs.run(images(count))["logits"]
        np.testing.assert_array_equal(ours.run(images(count))["logits"], wanted)
        # ONNX Runtime sums in another order where a weight was packed in advance.
        found = OnnxCarrier(early).runner().run(images(count))["logits"]
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_with_thresholds_of_zero_all_leave_at_the_first_exit() -> None:
    exits = Exits(residual_network(0))
    batch = images(8)
    model = exits.cut(0.0, 0.0)
    heads = with_heads(exits.carrier.graph(), exits.points, exits.answer, exits.own).model
    found = plain(model).run(batch)["logits"]
    np.testing.assert_array_equal(found, plain(heads).run(batch)["exit1.logits"])


@pytest.mark.parametrize("ending", ["Softmax", "LogSoftmax"])
def test_a_networks_own_softmax_follows_the_heads_too(ending: str) -> None:
    exits = Exits(residual_network(4, ending))
    batch = images(8)
    thresholds = [between(exits.sure(batch, n), 0.5) for n in (1, 2)]
    found = OnnxCarrier(exits.cut(*thresholds)).runner().run(batch)["output"]
    np.testing.assert_allclose(found, exits.wanted(batch, *thresholds), atol=1e-5)
    total = found.sum(1) if ending == "Softmax" else np.exp(found).sum(1)
    np.testing.assert_allclose(total, 1, atol=1e-5)


def test_what_comes_after_an_exit_is_not_executed_once_all_have_left(tmp_path: Path) -> None:
    import onnxruntime as ort

    exits = Exits(residual_network(0))
    threshold = between(exits.sure(images(8), 1), 0.5)
    sure = exits.sure(images(8), 1) >= threshold
    model = ir.to_proto(exits.cut(threshold, inf)).SerializeToString()
    executed = []
    for row in (int(np.flatnonzero(sure)[0]), int(np.flatnonzero(~sure)[0])):
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "profile")
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        session.run(None, {"x": images(8)["x"][row : row + 1]})
        events = json.loads(Path(session.end_profiling()).read_text())
        kinds = [e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "args" in e]
        executed.append(sum("Conv" in kind for kind in kinds if kind))
    assert executed == [2, 4]  # stem and first block; and all


def test_exports_run_as_the_graph_does(tmp_path: Path) -> None:
    exits = Exits(residual_network(1))
    batch = images(8)
    thresholds = [between(exits.sure(batch, n), 0.5) for n in (1, 2)]
    early = exits.carrier.with_graph(exits.cut(*thresholds))
    wanted = exits.wanted(batch, *thresholds)
    exporters = (
        OnnxExporter(),
        OnnxExporter(opset=18),
        OnnxExporter(external_data="always"),
        SafetensorsExporter(),
    )
    context = ExportContext(name="a-name-of-usual-length", spec_digest="0" * 64)
    for index, exporter in enumerate(exporters):
        folder = tmp_path / str(index)
        folder.mkdir()
        exporter.check(early)
        files = exporter.write(early, folder, context)
        assert sum(file.stat().st_size for file in files) == exporter.predict(early)
        for count in BATCHES:
            part = {"x": batch["x"][:count]}
            found = exporter.open(files[0]).run(part)["logits"]
            np.testing.assert_allclose(found, wanted[:count], atol=1e-5)
    loaded = compressor.load(tmp_path / "3")(torch.from_numpy(batch["x"]))
    np.testing.assert_allclose(loaded["logits"].numpy(), wanted, atol=1e-5)


def test_weights_that_a_branch_alone_reads_lie_in_it(tmp_path: Path) -> None:
    exits = Exits(residual_network(1))
    early = exits.carrier.with_graph(exits.cut(0.5, 0.5))
    for target in ("ort-cpu", "tensorrt"):
        exporter = OnnxExporter.model_validate({"target": target})
        (tmp_path / target).mkdir()
        (path,) = exporter.write(
            early, tmp_path / target, ExportContext(name="x", spec_digest="0" * 64)
        )
        graph = onnx.load(path).graph
        main = {tensor.name for tensor in graph.initializer}
        every = {tensor.name for tensor in all_initializers(graph)}
        # Lengths and axes are nodes in the branch, where onnx's inference has to know them.
        inside = [v for n, v in early.graph().graph.initializers.items() if n not in every]
        assert {value.dtype for value in inside} == {ir.DataType.INT64}
        count = len(weights(early)) - len(inside)
        assert exporter.check_written(early, path) == f"{count} tensors read back"
        moved = {"b2.conv.weight", "b3.conv.weight", "exit2.weight", "fc.weight"}
        assert every >= moved | {"stem.weight"}
        assert every - main >= moved if target == "ort-cpu" else main == every
        again = open_onnx(path, 21)
        assert [x.name for x in again.layers()] == [x.name for x in early.layers()]
        assert len(inspect_onnx(path, Silent()).tensors) == len(every)


def test_layers_in_branches_are_seen_and_costs_are_the_most() -> None:
    exits = Exits(residual_network(1))
    before, after = exits.carrier, OnnxCarrier(exits.cut(0.5, 0.5))
    names = [layer.name for layer in after.layers()]
    assert [n for n in names if not n.startswith("exit")] == [x.name for x in before.layers()]
    assert {"exit1", "exit2"} <= set(names)
    heads = sum(p.features * 3 for p in exits.points)
    assert macs(after.graph()) == macs(before.graph()) + heads
    assert sum(part_macs(before.graph(), exits.points, exits.answer)) == macs(after.graph())
    assert parameters(after.graph()) > parameters(before.graph()) + heads  # thresholds and biases
    assert [spec.name for spec in after.outputs] == ["logits"]
    assert after.outputs == before.outputs


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("maximum", "value 'largest': is read after an exit, and is computed from all samples"),
        ("merged", "value 'merged': is read after an exit, and has samples mixed with other"),
        ("later maximum", "value 'largest': is read after an exit, and is computed from all"),
    ],
)
def test_what_is_not_each_samples_own_is_refused(kind: str, message: str) -> None:
    exits = Exits(crossing_network(kind), (Exit(after="b1"),))
    with pytest.raises(SpecError, match=message):
        exits.cut(0.5)


def test_samples_that_depend_on_each_other_are_noticed() -> None:
    exits = Exits(crossing_network("running sum"), (Exit(after="b1"),))
    batch = images(8)
    threshold = between(exits.sure(batch, 1), 0.5)
    early, reference = OnnxCarrier(exits.cut(threshold)).runner(), exits.all_heads.run(batch)
    with pytest.raises(ModelError, match="depends on the others in the batch"):
        check_answers(early, reference, batch, exits.names, [threshold])
    everybody = OnnxCarrier(exits.cut(inf)).runner()
    check_answers(everybody, reference, batch, exits.names, [inf])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("b4",), "exits.0.after: is 'b4', which is not a layer; did you mean 'b"),
        (("b2", "b1"), "exits.1.after: is 'b1', which is not computed from 'b2'; list exits in"),
        (("b1", "b1.conv"), "exits.1.after: is 'b1.conv', the same place as 'b1'"),
        (("fc",), "exits.0.after: is 'fc', after which nothing is left to skip"),
    ],
)
def test_places_that_are_none_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Exits(residual_network(0), tuple(Exit(after=name) for name in options))
    assert message in str(caught.value)
