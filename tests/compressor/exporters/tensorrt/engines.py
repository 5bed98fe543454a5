"""Building real engines in tests, and small quantized graphs with one layer."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import pytest

from compressor.exporters import TensorrtExporter
from compressor.exporters.tensorrt.profiles import BatchRange
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.carrier import Carrier
from tests.compressor.exporters.hand_made import CONTEXT, Builder

needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)
BATCH = BatchRange(opt=8, max=64)
CHANNELS, SIDE = 16, 8

Between = Literal["", "Relu", "Sigmoid", "MaxPool", "AveragePool", "Concat"]


def addresses_can_be_fixed() -> bool:
    """Tell whether a process may switch the randomization of its addresses off."""
    own = "ctypes.CDLL(None).personality"
    code = f"import ctypes; {own}(0x40000); print({own}(0xFFFFFFFF) & 0x40000)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == str(0x40000)


def exporter(*capabilities: str, **options: Any) -> TensorrtExporter:
    """Return an exporter for the RTX builder; the batch may be 1 to 64."""
    return TensorrtExporter(compute_capability=capabilities, batch=BATCH, **options)


def built(made: TensorrtExporter, carrier: Carrier, folder: Path) -> dict[str, Any]:
    """Check a model, build its engine, and return the manifest."""
    made.check(carrier)
    engine, manifest = made.write(carrier, folder, CONTEXT)
    assert engine.stat().st_size > 1000
    assert sorted(p.name for p in folder.iterdir()) == [engine.name, manifest.name]
    content: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
    return content


def computed(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the type that each quantized layer is computed with."""
    return {row["layer"]: row["computed"] for row in manifest["quantized"]}


def convolution(
    between: Between = "",
    *,
    axis: int = 0,
    groups: int = 1,
    scaled: bool = False,
    activations: bool = True,
    batch: int | str = "batch",
) -> OnnxCarrier:
    """Return one int8 convolution with QuantizeLinear and DequantizeLinear.

    Args:
        between: an operator between the activations' DequantizeLinear and the convolution.
        axis: the weight's axis with one scale each; the output channels are axis 0.
        groups: of the convolution.
        scaled: the weight is multiplied with floats once more.
        activations: they are quantized.
        batch: the size, or the name of a dynamic one.
    """
    made = Builder()
    x = ir.val("x", ir.DataType.FLOAT, [batch, CHANNELS, SIDE, SIDE])
    value = x
    if activations:
        scale = made.constant("scale", np.float32(0.05))
        zero = made.constant("zero", np.int8(0))
        codes = made.node("QuantizeLinear", [value, scale, zero], "codes")
        value = made.node("DequantizeLinear", [codes, scale, zero], "dequantized")
    if between in ("MaxPool", "AveragePool"):
        value = made.node(between, [value], "pooled", kernel_shape=[2, 2])
    elif between == "Concat":
        wide = [made.constant("wide_scale", np.float32(0.2)), made.constant("none", np.int8(0))]
        codes = made.node("QuantizeLinear", [x, *wide], "wide_codes")
        other = made.node("DequantizeLinear", [codes, *wide], "wide")
        value = made.node(between, [value, other], "doubled", axis=1)
    elif between:
        value = made.node(between, [value], "between")
    random = np.random.default_rng(0)
    inputs = 2 * CHANNELS if between == "Concat" else CHANNELS
    shape = (CHANNELS, inputs // groups, 3, 3)
    weight = made.constant("conv.weight", random.integers(-127, 128, shape).astype(np.int8))
    scales = random.uniform(0.01, 0.02, shape[axis]).astype(np.float32)
    weights = [weight, made.constant("conv.weight_scale", scales)]
    read = made.node("DequantizeLinear", weights, "weight", axis=axis)
    if scaled:
        factor = made.constant("factor", random.random(shape).astype(np.float32))
        read = made.node("Mul", [read, factor], "scaled")
    result = made.node("Conv", [value, read], "conv", group=groups, pads=[1, 1, 1, 1])
    model = made.model([x], result)
    side = SIDE - 1 if between in ("MaxPool", "AveragePool") else SIDE
    model.graph.outputs[0].shape = ir.Shape([batch, CHANNELS, side, side])
    return OnnxCarrier(model)
