"""``cast``: operators one by one, which ONNX Runtime must run in half precision."""

import re

import numpy as np
import pytest

from compressor.types.tensors import Array
from tests.compressor.passes.quantize.cast_models import HALF, applied, half, stored
from tests.compressor.passes.quantize.small_models import (
    graph,
    noise,
    parity_db,
)

SINGLE = {
    "Resize": 'y = Resize<mode = "linear">(h, , scales)',
    "ConvTranspose": "y = ConvTranspose(h, k)",
    "BatchNormalization": "y = BatchNormalization(h, c, c, c, c)",
    "InstanceNormalization": "y = InstanceNormalization(h, c, c)",
    "GroupNormalization": "y = GroupNormalization<num_groups = 2>(h, c, c)",
    "PRelu": "y = PRelu(h, p)",
    "Einsum": 'y = Einsum<equation = "nchw,cd->ndhw">(h, e)',
    "Softplus": "y = Softplus(h)",
    "LRN": "y = LRN<size = 3>(h)",
    "AveragePool": "y = AveragePool<kernel_shape = [2, 2]>(h)",
    "MaxPool": "y = MaxPool<kernel_shape = [2, 2]>(h)",
    "GlobalAveragePool": "y = GlobalAveragePool(h)",
    "HardSwish": "y = HardSwish(h)",
    "CumSum": "y = CumSum(h, axis)",
    "ArgMax": "a = ArgMax<axis = 1>(h) y = Cast<to = 1>(a)",
    "Clip": "y = Clip(h, low, high)",
    "Pad": "y = Pad(h, pads, low)",
    "GridSample": "y = GridSample(h, grid)",
    "Celu": "y = Celu(h)",
    "Shape": "s = Shape(h) y = Expand(low, s)",
    "LayerNormalization": "y, m, v = LayerNormalization<axis = 1>(h, n)",
    "Dropout": "y = Dropout(h)",
    "Compare": "g = Greater(h, low) t = Cast<to = 1>(g) y = Mul(t, h)",
    "Random": "r = RandomUniformLike(h) z = Mul(r, nil) y = Add(z, h)",
}
CONSTANTS: dict[str, Array] = {
    "w": noise(4, 4, 3, 3),
    "k": noise(4, 2, 3, 3, seed=1),
    "c": np.full(4, 0.7, np.float32),
    "p": noise(4, 1, 1, seed=2),
    "e": noise(4, 3, seed=3),
    "n": noise(4, 6, 6, seed=4),
    "grid": np.tanh(noise(2, 5, 5, 2, seed=5)),
    "scales": np.array([1, 1, 2, 1.5], np.float32),
    "axis": np.array(1),
    "pads": np.array([0, 0, 1, 1, 0, 0, 0, 2]),
    "low": np.array(-0.5, np.float32),
    "high": np.array(0.5, np.float32),
    "nil": np.array(0, np.float32),
}


@pytest.mark.parametrize("name", SINGLE)
def test_operators_run_in_onnx_runtime_after_the_cast(name: str) -> None:
    text = SINGLE[name]
    words = set(re.findall(r"\w+", text)) | {"w"}
    used = {k: v for k, v in CONSTANTS.items() if k in words}
    carrier, result = half(
        f"g (float[2, 4, 8, 8] x) => (float[n, o, i, j] y) {{ h = Conv(x, w) {text} }}", **used
    )
    assert stored(result, "w") == HALF
    assert parity_db(carrier, result, {"x": noise(2, 4, 8, 8, seed=6)}) > 40


def test_recurrent_layers_run() -> None:
    text = """g (float[t, b, 8] x) => (float[t, d, b, 6] y) {
        h = MatMul(x, a) y, s = LSTM<hidden_size = 6>(h, w, r)
    }"""
    carrier, result = half(text, a=noise(8, 8), w=noise(1, 24, 8), r=noise(1, 24, 6))
    assert parity_db(carrier, result, {"x": noise(5, 2, 8)}) > 50


def test_older_opsets_are_cast_too() -> None:
    text = """g (float[n, 4, 8, 8] x) => (float[n, o, i, j] y) {
        h = Conv(x, w) y = Softmax<axis = 1>(h)
    }"""
    carrier = graph(text, {"w": noise(4, 4, 3, 3)}, opset=13)
    result = applied(carrier).carrier
    assert parity_db(carrier, result, {"x": noise(2, 4, 8, 8)}) > 50
