"""The torch graph executor against the cases that ONNX publishes for its operators."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.backend.test.case import base
from onnx.backend.test.loader import load_model_tests
from onnx.reference.ops import op_pool_common

from compressor.errors import ModelError
from compressor.models.element_types import from_numpy
from compressor.models.executor import GraphModule
from compressor.models.executor.compiler import OLDEST_OPSET
from compressor.models.executor.ops import OPERATORS
from compressor.types.tensors import Array
from tests.compressor.models.executor.parity import DEVICES

TRAINING = "training only"
RANDOM = "gives random numbers"
SEQUENCE = "a sequence or an optional is not a tensor"
STRING = "a string is not a tensor"
OTHER = "not an operator of neural networks"
NEWER = "newer than the models this is for; its cases written in other operators pass"

RUNTIME = "foreign files only: run by ONNX Runtime"

UNSUPPORTED_OPERATORS = {
    "Adagrad": TRAINING,
    "Adam": TRAINING,
    "AffineGrid": RUNTIME,
    "ArrayFeatureExtractor": OTHER,
    "Bernoulli": RANDOM,
    "Binarizer": OTHER,
    "BitCast": RUNTIME,
    "CausalConvWithState": NEWER,
    "CenterCropPad": RUNTIME,
    "CumProd": RUNTIME,
    "FlexAttention": NEWER,
    "Hardmax": RUNTIME,
    "ImageDecoder": "reads image files",
    "LabelEncoder": OTHER,
    "LinearAttention": NEWER,
    "LpNormalization": RUNTIME,
    "LpPool": RUNTIME,
    "MaxUnpool": RUNTIME,
    "MeanVarianceNormalization": RUNTIME,
    "MelWeightMatrix": "a constant that exporters fold",
    "Momentum": TRAINING,
    "NegativeLogLikelihoodLoss": TRAINING,
    "OptionalGetElement": SEQUENCE,
    "OptionalHasElement": SEQUENCE,
    "QLinearConv": RUNTIME,
    "QLinearMatMul": RUNTIME,
    "RandomUniformLike": RANDOM,
    "RegexFullMatch": STRING,
    "ReverseSequence": RUNTIME,
    "Scatter": RUNTIME,
    "SequenceEmpty": SEQUENCE,
    "SequenceInsert": SEQUENCE,
    "SequenceLength": SEQUENCE,
    "SequenceMap": SEQUENCE,
    "SoftmaxCrossEntropyLoss": TRAINING,
    "SplitToSequence": SEQUENCE,
    "StringConcat": STRING,
    "StringNormalizer": STRING,
    "StringSplit": STRING,
    "TensorScatter": RUNTIME,
    "TfIdfVectorizer": OTHER,
    "TreeEnsemble": OTHER,
    "Upsample": RUNTIME,
}
"""Every case that has one of these nodes has to be refused."""

UNSUPPORTED_CASES = {
    "test_batchnorm_epsilon_training_mode": TRAINING,
    "test_batchnorm_example_training_mode": TRAINING,
    "test_dropout_random_old": "of opset 11, where the ratio was an attribute",
    "test_equal_string": STRING,
    "test_equal_string_broadcast": STRING,
    "test_identity_opt": SEQUENCE,
    "test_identity_sequence": SEQUENCE,
    "test_if_opt": SEQUENCE,
    "test_if_seq": SEQUENCE,
    "test_loop13_seq": SEQUENCE,
    "test_loop16_seq_none": SEQUENCE,
    "test_loop11": "of opset 11, where the axes of Unsqueeze were an attribute",
    "test_not_2d": "of opset 1",
    "test_not_3d": "of opset 1",
    "test_not_4d": "of opset 1",
    "test_scan_sum": "of opset 8, where Scan had a batch axis",
    "test_training_dropout": TRAINING,
    "test_training_dropout_default": TRAINING,
    "test_training_dropout_default_mask": TRAINING,
    "test_training_dropout_mask": TRAINING,
    "test_training_dropout_zero_ratio": TRAINING,
    "test_training_dropout_zero_ratio_mask": TRAINING,
}
"""Further cases that have to be refused."""

OTHER_VALUES = {
    "test_resize_downsample_scales_cubic_align_corners": (
        "from the whole output length, as in ONNX Runtime and PyTorch"
    ),
    "test_resize_downsample_scales_linear_align_corners": (
        "from the whole output length, as in ONNX Runtime and PyTorch"
    ),
}
"""Cases whose values are other ones here, on purpose."""

WITHOUT_CASES = {"SimplifiedLayerNormalization"}
"""Supported operators for which ONNX has no case."""

SUPPORTED = sorted(name for domain, name in OPERATORS if not domain)

_SLACK = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two units in the last place: the published tolerance is for types with more bits."""


def pooled(
    usual: Any, padded: Array, shape: Any, kernel: Any, strides: Any, *rest: Any, **more: Any
):
    """Pool as ONNX does; where all windows are whole, all of them at once."""
    out, kind = rest[:2]
    if len(rest) > 2 or more.keys() - {"p"} or len(shape) < 5:
        return usual(padded, shape, kernel, strides, *rest, **more)
    axes = tuple(range(2, padded.ndim))
    steps = (slice(None), slice(None), *(slice(None, None, step) for step in strides))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axes)[steps]
    inner, power = tuple(-1 - axis for axis in range(len(axes))), more.get("p", 1)
    if kind == "LPPOOL":
        found = (np.abs(windows) ** power).sum(inner) ** (1.0 / power)
    else:
        found = windows.mean(inner) if kind == "AVG" else windows.max(inner)
    assert found.shape[2:] == tuple(out)
    return found.astype(padded.dtype)


@pytest.fixture(scope="module")
def cases() -> Mapping[str, list[Any]]:
    """The published cases by operator; the form in other operators counts for the same one."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        # It reads their sources for ONNX's documentation, and pools window by window in Python.
        patch.setattr(base, "process_snippet", lambda *names: (names[1], ""))
        patch.setattr(op_pool_common, "pool", partial(pooled, op_pool_common.pool))
        found = load_model_tests(kind="node")
    operators = {case.name: [node.op_type for node in case.model.graph.node] for case in found}
    groups: dict[str, list[Any]] = defaultdict(list)
    for case in found:
        nodes = operators.get(case.name.partition("_expanded")[0], operators[case.name])
        first = next((name for name in nodes if name != "Constant"), "Constant")
        groups[first].append(case)
    return groups


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, onnx.TensorProto):
        return from_numpy(ir.from_proto(value))
    array = np.asarray(value)
    # Inputs that the graph gets as objects are strings, which it refuses before it sees them.
    return from_numpy(ir.Tensor(array)) if array.dtype != object else torch.empty(0)


def _refusal(case: Any) -> str | None:
    if case.name in UNSUPPORTED_CASES:
        return UNSUPPORTED_CASES[case.name]
    nodes = (node.op_type for node in case.model.graph.node)
    return next((UNSUPPORTED_OPERATORS[n] for n in nodes if n in UNSUPPORTED_OPERATORS), None)


def _graph(case: Any) -> ir.Model:
    """Return a case's graph, of the oldest opset that is run where it is of an older one.

    Cases say the opset in which their operator last changed, which is the form of all opsets
    since; those of an earlier form are in `UNSUPPORTED_CASES`.
    """
    model = ir.from_proto(case.model)
    if 7 <= model.opset_imports.get("", OLDEST_OPSET) < OLDEST_OPSET:
        model.opset_imports[""] = OLDEST_OPSET
    return model


def _run(case: Any, device: str) -> None:
    model = _graph(case)
    module = GraphModule(model).to(device)
    for inputs, expected in case.data_sets:
        results = module(*(_tensor(value).to(device) for value in inputs))
        assert list(results) == [value.name for value in model.graph.outputs]
        for result, value in zip(results.values(), expected, strict=True):
            wanted, result = _tensor(value), result.cpu()
            rtol = max(case.rtol, _SLACK.get(wanted.dtype, 0.0))
            if wanted.is_floating_point() and wanted.dtype.itemsize == 1:
                assert result.dtype == wanted.dtype
                result, wanted = result.float(), wanted.float()
            torch.testing.assert_close(
                result, wanted, rtol=rtol, atol=max(case.atol, 1e-6), equal_nan=True
            )


def _problem(case: Any) -> str | None:
    """Say how a case went otherwise than it should."""
    reason = _refusal(case)
    try:
        for device in DEVICES:
            _run(case, device)
    except ModelError as error:
        return None if reason else f"{case.name}: {error}"
    except AssertionError as error:
        return None if case.name in OTHER_VALUES else f"{case.name}: {error}"
    if reason or case.name in OTHER_VALUES:
        return f"{case.name}: passes, though it is listed as unsupported ({reason})"
    return None


@pytest.mark.parametrize("operator", sorted({*SUPPORTED, *UNSUPPORTED_OPERATORS, "Constant"}))
def test_operator(operator: str, cases: Mapping[str, list[Any]]) -> None:
    problems = [problem for case in cases.get(operator, ()) if (problem := _problem(case))]
    assert not problems, "\n".join(problems)


def test_every_published_operator_is_tested(cases: Mapping[str, list[Any]]) -> None:
    assert set(cases) <= {*SUPPORTED, *UNSUPPORTED_OPERATORS, "Constant"}


def test_lists_name_what_exists(cases: Mapping[str, list[Any]]) -> None:
    names = {case.name for group in cases.values() for case in group}
    nodes = {
        node.op_type for group in cases.values() for case in group for node in case.model.graph.node
    }
    assert {*UNSUPPORTED_CASES, *OTHER_VALUES} <= names
    assert set(UNSUPPORTED_OPERATORS) <= nodes
    assert not set(UNSUPPORTED_OPERATORS) & set(SUPPORTED)
    assert {name for name in SUPPORTED if name not in cases} == WITHOUT_CASES
