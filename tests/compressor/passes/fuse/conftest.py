"""A carrier that only holds a graph, and ways to make and run graphs."""

import logging
import re
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from compressor.graph.values import all_nodes
from compressor.passes.fuse.fuse import Fuse
from compressor.types.passes import PassContext


@dataclass(frozen=True)
class GraphCarrier:
    model: ir.Model
    kind: str = "onnx"

    def graph(self):
        return self.model

    def with_graph(self, graph):
        return GraphCarrier(graph, self.kind)


def serialize(model):
    return ir.serde.serialize_model(model).SerializeToString(deterministic=True)


@pytest.fixture(scope="session")
def fuse():
    """Fuse a model; return the outcome, whose carrier holds the new one."""

    def call(model, kind="onnx", **options):
        before = serialize(model)
        outcome = Fuse(**options).apply(GraphCarrier(model, kind), PassContext(), {})
        assert serialize(model) == before, "the carrier's graph was changed"
        onnx.checker.check_model(ir.serde.serialize_model(outcome.carrier.model), full_check=True)
        return outcome

    return call


@pytest.fixture(scope="session")
def survey():
    def call(model, kind="onnx", **options):
        return Fuse(**options).survey(GraphCarrier(model, kind), PassContext())

    return call


@pytest.fixture(scope="session")
def run():
    """Run a model in ONNX Runtime without its own fusions."""

    def call(model, feeds):
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(
            serialize(model), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, feeds)

    return call


@pytest.fixture(scope="session")
def parse():
    """Read a model in ONNX's text form, which has no dots in names; parameters may have some."""

    def call(text, parameters=None, opset=21, domains=""):
        header = f'<ir_version: 10, opset_import: ["" : {opset}{domains}]>\n'
        for name in parameters or {}:
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", name.replace(".", "__"), text)
        logging.disable()  # the parameters are no inputs yet
        model = ir.serde.deserialize_model(onnx.parser.parse_model(header + text))
        logging.disable(logging.NOTSET)
        read = {v.name: v for node in all_nodes(model.graph) for v in node.inputs if v}
        for name, array in (parameters or {}).items():
            value = read[name.replace(".", "__")]
            value.name, value.const_value = name, ir.Tensor(np.asarray(array), name=name)
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())
            model.graph.register_initializer(value)
        return model

    return call


@pytest.fixture(scope="session")
def lower():
    """Lower a torch module as the carriers do."""

    def call(module, args, dynamic):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module.eval(),
                args,
                dynamo=True,
                optimize=False,
                opset_version=21,
                dynamic_shapes=dynamic,
                verbose=False,
            )
        return program.model

    return call


@pytest.fixture(scope="session")
def ops():
    """Count the operators of a model."""

    def call(model):
        return dict(Counter(node.op_type for node in all_nodes(model.graph)))

    return call


@pytest.fixture(scope="session")
def agree(run):
    """Check that two models give the same, up to 1e-4 of the largest value."""

    def call(first, second, feeds, tolerance=1e-4):
        old, new = run(first, feeds), run(second, feeds)
        assert len(old) == len(new)
        for a, b in zip(old, new, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            a, b = a.astype(np.float64), b.astype(np.float64)
            assert np.isfinite(a).all()
            assert np.abs(a - b).max() <= tolerance * max(np.abs(a).max(), 1e-6)

    return call


@pytest.fixture
def rng():
    return np.random.default_rng(0)
