"""ONNX tensors as torch tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.errors import ModelError
from compressor.models.element_types import from_numpy


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (ml_dtypes.bfloat16, torch.bfloat16),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
        (ml_dtypes.float8_e5m2, torch.float8_e5m2),
        (ml_dtypes.int4, torch.int8),
        (ml_dtypes.uint4, torch.uint8),
        (ml_dtypes.float4_e2m1fn, torch.float8_e4m3fn),
        (np.float16, torch.float16),
        (np.uint16, torch.uint16),
        (np.bool_, torch.bool),
    ],
)
def test_from_numpy(dtype: Any, held: torch.dtype) -> None:
    array = np.array([[0, 1, 3], [4, 6, 2]]).astype(dtype)
    for source in (array, array[:, ::-1], np.array(3).astype(dtype)):
        tensor = from_numpy(ir.Tensor(source))
        assert tensor.dtype == held
        assert tensor.shape == source.shape
        np.testing.assert_array_equal(tensor.float().numpy(), source.astype(np.float32))


def test_from_numpy_of_an_array_that_is_read_only() -> None:
    array = np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    tensor = from_numpy(ir.Tensor(array))
    assert tensor.data_ptr() == array.ctypes.data


def test_from_numpy_of_a_torch_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    tensor = from_numpy(ir.tensor_adapters.TorchTensor(parameter, "p"))
    assert tensor.data_ptr() == parameter.data_ptr()
    assert not tensor.requires_grad


def test_from_numpy_of_strings() -> None:
    with pytest.raises(ModelError, match=r"tensor 'words': its element type STRING"):
        from_numpy(ir.StringTensor([b"a"], shape=ir.Shape([1]), name="words"))
