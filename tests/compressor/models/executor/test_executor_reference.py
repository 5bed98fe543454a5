"""Operators and forms of them that ONNX's reference implementation runs in the executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper

from compressor.errors import ModelError
from compressor.models.executor import GraphModule
from tests.compressor.models.executor.parity import assert_node_same, floats, make_model


def _attention(**attributes: Any) -> GraphModule:
    names = ("q", "k", "v", "mask")
    inputs = {name: floats(2, 3, 4, 8, seed=i) for i, name in enumerate(names[:3])}
    node = helper.make_node("Attention", names, ["y"], **attributes)
    model = make_model([node], {**inputs, "mask": np.zeros((4, 4), np.bool_)}, {})
    model.opset_import[0].version = 24
    return GraphModule(ir.from_proto(model))


def _queries(*, requires_grad: bool = False) -> list[torch.Tensor]:
    tensors = [torch.from_numpy(floats(2, 3, 4, 8, seed=seed)) for seed in range(3)]
    return [tensor.requires_grad_(requires_grad) for tensor in tensors]


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_shifts(dtype: type[np.unsignedinteger[Any]], direction: str) -> None:
    rng = np.random.default_rng(0)
    inputs = {name: rng.integers(0, 12, (3, 4)).astype(dtype) for name in ("x", "by")}
    assert_node_same("BitShift", inputs, {"direction": direction})


@pytest.mark.parametrize("name", ["BlackmanWindow", "HammingWindow", "HannWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows(name: str, periodic: int) -> None:
    assert_node_same(name, {"size": np.array(11, np.int64)}, {"periodic": periodic})


@pytest.mark.parametrize("onesided", [0, 1])
def test_spectrogram(onesided: int) -> None:
    inputs = {"x": floats(2, 100, 1), "step": np.array(5, np.int64), "window": floats(16)}
    assert_node_same("STFT", inputs, {"onesided": onesided})


def test_blocks_that_overlap() -> None:
    sizes = {"image": np.array([8, 9], np.int64), "block": np.array([2, 3], np.int64)}
    form = {"pads": [1, 0, 1, 2], "strides": [2, 1]}
    assert_node_same("Col2Im", {"x": floats(2, 18, 45), **sizes}, form)


def test_statistics_of_a_layer_norm() -> None:
    inputs = {"x": floats(2, 3, 8), "scale": floats(8), "bias": floats(8, seed=1)}
    assert_node_same("LayerNormalization", inputs, {"axis": -1}, outputs=3)


def test_a_default_that_is_spelled_out_keeps_the_gradient() -> None:
    tensors = _queries(requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    (result,) = _attention(softcap=0.0, is_causal=0)(*tensors, mask).values()
    result.sum().backward()
    assert tensors[2].grad is not None


def test_what_is_hidden_from_every_query_is_zero() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    tensors = _queries(requires_grad=True)
    (result,) = _attention()(*tensors, mask).values()
    assert not result[:, :, 2].any()
    result.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def test_a_rare_form_has_values_but_no_gradient() -> None:
    module, tensors = _attention(softcap=1e6), _queries(requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with torch.no_grad():
        (result,) = module(*tensors, mask).values()
    (plain,) = _attention()(*tensors, mask).values()
    torch.testing.assert_close(result, plain.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match=r"Attention, opset 24.*it has no gradient; keep it out"):
        module(*tensors, mask)


def test_what_no_one_understands_is_refused() -> None:
    with pytest.raises(ModelError, match="attribute 'hardcap' is not supported"):
        _attention(softcap=2.0, hardcap=1.0)
    node = helper.make_node("BitShift", ["x", "x"], ["y"], name="n")
    model = make_model([node], {"x": np.zeros(3, np.uint8)}, {})
    with pytest.raises(ModelError, match=r"node 'n' .*does not run it: Attribute 'direction'"):
        GraphModule(ir.from_proto(model))


@pytest.mark.parametrize(
    ("op", "inputs", "form"),
    [
        ("CumSum", {"x": floats(3, 4), "axis": np.array(1)}, {"exclusive": 1, "reverse": 1}),
        (
            "ArgMin",
            {"x": np.array([[2, 0, 0, 1]], np.float32)},
            {"axis": 1, "select_last_index": 1},
        ),
        ("MaxPool", {"x": floats(1, 2, 5, 6)}, {"kernel_shape": [3, 2], "storage_order": 1}),
        (
            "OneHot",
            {
                "x": np.array([[1, -2]]),
                "depth": np.array(4),
                "values": np.array([2, 5], np.float32),
            },
            {"axis": 1},
        ),
        (
            "OneHot",
            {"x": np.array([1, 2]), "depth": np.array([4]), "values": np.array([2, 5], np.float32)},
            {},
        ),
        (
            "Resize",
            {
                "x": floats(1, 2, 7, 5),
                "roi": np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 1.2], np.float32),
                "scales": np.array([1, 1, 2, 3], np.float32),
            },
            {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
        ),
    ],
)
def test_rare_forms(op: str, inputs: dict[str, Any], form: dict[str, Any]) -> None:
    assert_node_same(op, inputs, form, outputs=2 if op == "MaxPool" else 1)


def test_whole_numbers_need_no_gradient() -> None:
    """Places are found in what is trained, too."""
    node = helper.make_node("ArgMax", ["x"], ["y"], axis=1, select_last_index=1)
    module = GraphModule(ir.from_proto(make_model([node], {"x": floats(2, 3)}, {})))
    (result,) = module(torch.tensor([[1.0, 4.0, 4.0]], requires_grad=True)).values()
    assert result.tolist() == [[2]]
