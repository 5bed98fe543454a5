"""Evaluation beside the float model, sample by sample."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import DataError
from compressor.graph.inference import infer_shapes
from compressor.graph.output_parts import WHOLE
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.run.data import Data
from compressor.run.evaluate import CachingRunner, evaluate, layer_signals, outputs_of
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.run.metrics.metrics import COSINE, MSE, Metric, resolve_metric
from compressor.types.data import SourceInfo
from compressor.types.tensors import Batch
from tests.compressor.tiny_project import sample_images, tiny_onnx


@dataclass(frozen=True)
class Rows:
    """A source of given rows."""

    x: np.ndarray
    label: np.ndarray

    def info(self) -> SourceInfo:
        return SourceInfo(len(self.x), ())

    def digest(self) -> str:
        return "rows"

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        assert limit is None
        for start in range(0, len(self.x), size):
            yield {"x": self.x[start : start + size], "label": self.label[start : start + size]}


class Runs:
    runtime = "numpy"

    def __init__(self, function: Callable[[np.ndarray], np.ndarray], name: str = "y"):
        self.function, self.name = function, name

    def run(self, batch: Batch) -> Batch:
        return {self.name: self.function(batch["x"])}


X = np.eye(5, 3, dtype=np.float32) + 0.5
REFERENCE = Runs(lambda x: x)


def data(target: str | None = "label", batch: int = 2) -> Data:
    return Data("evaluation", Rows(X, X.argmax(1)), target, batch, "", "spec.yaml:3")


def test_an_error_of_zeros_is_the_float_models_and_the_datas():
    """Default limits of errors are a share of it, so no artifact may change it."""
    outputs = resolve_metric("mse", False, getattr, "spec.yaml:3")
    rows = data(target=None)
    found = evaluate(REFERENCE, REFERENCE, rows, outputs)
    assert found.zeros == pytest.approx(np.square(X).mean())
    assert evaluate(Runs(lambda x: 2 * x), REFERENCE, rows, outputs).zeros is None
    assert evaluate(REFERENCE, REFERENCE, data(), ACCURACY).zeros is None


def test_a_model_against_itself():
    found = evaluate(REFERENCE, REFERENCE, data(), ACCURACY)
    assert found.metric["value"] == 100
    assert (found.sqnr_db, found.agreement, found.max_abs_diff) == (None, 100, 0)
    assert found.per_sample.tolist() == [1] * 5
    assert set(found.as_json()) == set(vars(found)) - {"per_sample", "decisions"}
    assert found.unread == {}
    assert found.constant is not None
    assert found.constant < 100
    other = evaluate(Runs(lambda x: x), REFERENCE, data(), ACCURACY)
    assert other.constant is None
    assert (found.copies, other.copies) == (1, 0)  # the last two rows are equal
    assert found.kl is None


@pytest.mark.parametrize("batch", [1, 2, 4, 12])
def test_copies_are_equal_in_inputs_and_target(batch: int):
    x = np.array([[1.0], [1.0], [2.0], [1.0], [3.0], [2.0]], dtype=np.float32)
    rows = Rows(x, np.array([0, 0, 0, 1, 0, 0]))
    given = Data("evaluation", rows, "label", batch, "", "spec.yaml:3")
    runs = Runs(lambda x: np.hstack([x, x - 1]))
    assert evaluate(runs, runs, given, ACCURACY).copies == 2


def test_noise_is_measured_against_the_float_model():
    found = evaluate(Runs(lambda x: x * 1.1, "other"), REFERENCE, data(), ACCURACY)
    assert found.sqnr_db == pytest.approx(20, abs=1e-4)
    assert found.max_abs_diff == pytest.approx(0.15, abs=1e-6)
    assert found.agreement == 100


def test_parts_of_joined_outputs_are_compared_alike():
    """Boxes of hundreds of pixels hid the error of scores below one."""
    boxed = Runs(lambda x: np.concatenate([640 * x, x], axis=1))
    noisy = Runs(lambda x: np.concatenate([640 * x, 1.1 * x], axis=1))
    parts = [((slice(None), slice(0, 3)), (slice(None), slice(3, 6)))]
    whole = evaluate(noisy, boxed, data(), ACCURACY)
    cut = evaluate(noisy, boxed, data(), ACCURACY, parts=parts)
    assert whole.sqnr_db is not None
    assert whole.sqnr_db > 70
    assert cut.sqnr_db == pytest.approx(20 + 10 * np.log10(2), abs=1e-4)


class Twofold(Runs):
    """Gives one more output."""

    def run(self, batch: Batch) -> Batch:
        return {**super().run(batch), "more": -self.function(batch["x"])}


def test_outputs_of_other_sizes_count_equally_in_an_error_and_in_its_limit():
    """The limit of a Siamese network was lower than that of all elements together."""
    pair = Runs(lambda x: x)
    pair.run = lambda batch: {"features": batch["x"], "score": 3 * batch["x"][:, :1]}  # type: ignore[method-assign]
    outputs = resolve_metric("mse", False, getattr, "spec.yaml:3")
    found = evaluate(pair, pair, data(target=None), outputs)
    squares = np.square(X).mean(), np.square(3 * X[:, :1]).mean()
    assert found.zeros == pytest.approx(np.mean(squares))


@pytest.mark.parametrize(
    ("metric", "target", "unread"),
    [
        (ACCURACY, "label", ["more"]),
        (MSE, "label", ["more"]),
        (COSINE, None, []),
        ("own", None, []),
    ],
)
def test_outputs_that_no_metric_looks_at_are_named(
    metric: Any, target: str | None, unread: list[str]
):
    """A second output was destroyed by training, and no word said that nothing judged it."""
    if metric == "own":
        metric = Metric("own:f", lambda outputs, _: np.ones(len(outputs["y"])), code=print)
    elif target is None:
        metric = replace(metric, against_float=True)
    rows = Rows(X, X if metric is MSE else X.argmax(1))
    given = Data("evaluation", rows, target, 2, "", "spec.yaml:3")
    found = evaluate(Twofold(lambda x: x * 1.1), Twofold(lambda x: x), given, metric)
    spread = 10 * np.log10(np.var(X) / np.mean(np.square(0.1 * X)))
    assert found.unread == {name: pytest.approx(spread, abs=1e-3) for name in unread}
    halves = (slice(None), slice(0, 2)), (slice(None), slice(2, 3))
    doubled = Twofold(lambda x: x * 1.1), Twofold(lambda x: x)
    cut = evaluate(*doubled, given, metric, parts=[WHOLE, halves])
    assert cut.unread == found.unread


def test_agreement_is_about_decisions_and_not_about_labels():
    wrong = np.zeros(5, np.int64)
    both = Data("evaluation", Rows(X, wrong), "label", 2, "", "")
    found = evaluate(Runs(lambda x: -x), Runs(lambda x: -x), both, ACCURACY)
    assert found.agreement == 100
    assert found.metric["value"] < 100
    flipped = evaluate(Runs(lambda x: -x), REFERENCE, both, ACCURACY)
    assert flipped.agreement is not None
    assert flipped.agreement < 100


def test_without_labels_the_float_model_is_the_target():
    metric = resolve_metric("mse", False, None, "")  # type: ignore[arg-type]
    found = evaluate(Runs(lambda x: x + 2, "other"), REFERENCE, data(target=None), metric)
    assert found.metric["value"] == pytest.approx(4)
    assert found.agreement is None


def test_the_batch_size_does_not_matter():
    half = Runs(lambda x: np.where(x > 1, 0, x))
    results = [evaluate(half, REFERENCE, data(batch=b), ACCURACY) for b in (1, 2, 5, 9)]
    assert all(r.per_sample.tolist() == results[0].per_sample.tolist() for r in results)
    assert all(r.sqnr_db == pytest.approx(results[0].sqnr_db) for r in results)


def test_progress_counts_samples():
    seen: list[int] = []
    evaluate(REFERENCE, REFERENCE, data(), ACCURACY, seen.append)
    assert seen == [2, 4, 5]


def test_the_sample_with_nan_is_named():
    for wrong in (np.nan, -np.inf):
        third = Runs(lambda x, wrong=wrong: np.where((x == X[2]).all(1, keepdims=True), wrong, x))
        with pytest.raises(DataError, match="output 'y': is NaN or infinite for sample 2;"):
            evaluate(third, REFERENCE, data(), ACCURACY)


def test_a_float_model_that_gives_nan_is_to_blame():
    """Passes that narrow ranges were blamed before there was one."""
    wrong = Runs(lambda x: x * np.nan)
    with pytest.raises(DataError, match="look at that sample, and at the model: it is the float"):
        evaluate(wrong, wrong, data(), ACCURACY)
    with pytest.raises(DataError, match="and at passes that narrow the range"):
        evaluate(wrong, REFERENCE, data(), ACCURACY)


def test_no_samples():
    empty = Data("evaluation", Rows(X[:0], np.zeros(0)), "label", 2, "", "")
    with pytest.raises(DataError, match="has no samples"):
        evaluate(REFERENCE, REFERENCE, empty, ACCURACY)


def test_whole_number_outputs():
    count = Metric("m", lambda o, _: o["y"][:, 0])
    found = evaluate(
        Runs(lambda x: x.astype(np.int64)), Runs(lambda x: x.astype(np.int64)), data(), count
    )
    assert found.metric["value"] == pytest.approx(0.2)


@pytest.fixture
def carrier(tmp_path_factory: pytest.TempPathFactory) -> OnnxCarrier:
    import onnx

    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    onnx.save(tiny_onnx(), path)
    return open_onnx(path, 21)


def test_the_layer_that_lost_the_signal_is_found(carrier: OnnxCarrier):
    first, second, last = carrier.layers()
    changed = carrier.with_weights({second.weight: carrier.weight(second) * 1.01})
    signals = layer_signals(changed, carrier, [{"image": sample_images(3, 80)}])
    assert list(signals) == [first.name, second.name, last.name]
    assert signals[first.name] is None
    assert 30 < (signals[second.name] or 0) < 50
    assert 30 < (signals[last.name] or 0) < 60


def rows_net(order: list[int], apart: list[int], factor: float) -> OnnxCarrier:
    """A product of rows, which are in the order of samples or of tokens."""
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) * factor
    made = helper.make_graph(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=order),
            helper.make_node("Reshape", ["t", "flat"], ["m"]),
            helper.make_node("MatMul", ["m", "layer.weight"], ["p"]),
            helper.make_node("Reshape", ["p", "apart"], ["r"]),
            helper.make_node("Transpose", ["r"], ["y"], perm=order),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, 8])],
        [
            numpy_helper.from_array(array, name)
            for name, array in {
                "layer.weight": weight,
                "flat": np.array([-1, 8]),
                "apart": np.array(apart),
            }.items()
        ],
    )
    opsets = [helper.make_opsetid("", 21)]
    model = ir.from_proto(helper.make_model(made, opset_imports=opsets, ir_version=10))
    infer_shapes(model)
    return OnnxCarrier(model)


@pytest.mark.parametrize("tokens_first", [True, False])
def test_rows_are_compared_in_the_same_order(tokens_first: bool):
    """After ``fuse`` a layer that read tokens first reads samples first, under the same name."""
    nets = [([1, 0, 2], [3, -1, 8]), ([0, 1, 2], [-1, 3, 8])]
    before, after = nets if tokens_first else nets[::-1]
    batch = {"x": np.random.default_rng(1).normal(size=(5, 3, 8)).astype(np.float32)}
    signals = layer_signals(rows_net(*after, 1.01), rows_net(*before, 1.0), [batch])
    assert signals["layer"] == pytest.approx(40.0, abs=0.1)


class CountedRunner:
    """A runner that counts its runs."""

    runtime = "a test"

    def __init__(self) -> None:
        self.runs = 0

    def run(self, batch: Batch) -> Batch:
        self.runs += 1
        return {"y": 2 * batch["x"]}


def test_a_model_is_run_once_for_each_batch():
    counted = CountedRunner()
    runner = CachingRunner(lambda: counted)
    first, other = {"x": np.ones((2, 3), np.float32)}, {"x": np.zeros((2, 3), np.float32)}
    for batch in (first, other, first, other, {"x": first["x"].copy()}):
        assert (runner.run(batch)["y"] == 2 * batch["x"]).all()
    assert counted.runs == 2
    runner.run({"x": np.ones((3, 2), np.float32)})
    assert counted.runs == 3


def test_right_answers_beside_what_a_model_reads_make_no_other_batch():
    counted = CountedRunner()
    runner = CachingRunner(lambda: counted, reads=["x"])
    inputs = {"x": np.ones((2, 3), np.float32)}
    for labels in (np.zeros(2), np.ones(2), np.array(["a", None], object)):
        runner.run({**inputs, "label": labels})
    runner.run(inputs)
    assert counted.runs == 1


def test_what_is_remembered_keeps_no_memory_of_the_runtime():
    runner = CachingRunner(OnnxCarrier(ir.from_proto(tiny_onnx())).runner)
    batch = {"image": sample_images(0, 2)}
    for _ in range(2):
        assert all(array.base is None for array in runner.run(batch).values())


def test_a_closed_model_is_opened_again_for_a_new_batch_alone():
    opened: list[CountedRunner] = []

    def open_runner() -> CountedRunner:
        opened.append(CountedRunner())
        return opened[-1]

    runner = CachingRunner(open_runner)
    first, other = {"x": np.ones((2, 3), np.float32)}, {"x": np.zeros((2, 3), np.float32)}
    assert not opened
    runner.run(first)
    runner.close()
    assert (runner.run(first)["y"] == 2).all()
    assert len(opened) == 1
    assert (runner.run(other)["y"] == 0).all()
    assert len(opened) == 2


def test_outputs_that_take_too_much_memory_are_computed_again():
    counted = CountedRunner()
    runner = CachingRunner(lambda: counted, most=24)
    small, large = {"x": np.ones((2, 3), np.float32)}, {"x": np.zeros((3, 3), np.float32)}
    for batch in (small, large, small, large):
        assert (runner.run(batch)["y"] == 2 * batch["x"]).all()
    assert counted.runs == 3


def test_a_model_is_open_while_it_is_needed():
    opened: list[CountedRunner] = []

    def opener() -> CountedRunner:
        opened.append(CountedRunner())
        return opened[-1]

    runner = CachingRunner(opener)
    assert not opened
    for value in (1, 2):
        runner.run({"x": np.full((2, 3), value, np.float32)})
    assert len(opened) == 1
    runner.close()
    runner.run({"x": np.full((2, 3), 2, np.float32)})
    assert len(opened) == 1, "that is remembered"
    runner.run({"x": np.full((2, 3), 3, np.float32)})
    assert len(opened) == 2


def test_a_batch_can_be_run_in_parts():
    counted = CountedRunner()
    batch = {"x": np.arange(10, dtype=np.float32).reshape(5, 2)}
    np.testing.assert_array_equal(outputs_of(counted, batch, 2)["y"], 2 * batch["x"])
    assert counted.runs == 3

    class Total(CountedRunner):
        """A model whose output is not one of samples."""

        def run(self, batch: Batch) -> Batch:
            return {"y": batch["x"].sum(keepdims=True)}

    assert outputs_of(Total(), batch, 2)["y"] == 45


@pytest.mark.parametrize("place", [0, (1 << 18) - 1, 1 << 18, 3 * (1 << 17) - 1])
def test_the_largest_difference_is_found_wherever_it_is(place: int):
    """Outputs are widened in parts of 262144 values."""
    values = np.zeros((1, 3 * (1 << 17)), np.float32)
    source = Data("evaluation", Rows(values, np.zeros(1)), None, 1, "", "spec.yaml:3")

    def spoiled(x: np.ndarray) -> np.ndarray:
        changed = x.copy()
        changed[0, place] = -2.5
        return changed

    metric = resolve_metric("mse", False, None, "")  # type: ignore[arg-type]
    assert evaluate(Runs(spoiled), REFERENCE, source, metric).max_abs_diff == 2.5
