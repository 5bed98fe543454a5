"""What kinds of compression could bring, with peaks that make it easy to work out."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from compressor.graph.costs import Traffic
from compressor.lab.roofline.measuring import Kernel, Peaks
from compressor.lab.roofline.work import KINDS, Prospect, Work, prospects, timed

PEAKS = Peaks(1, {"float32": 100.0, "float16": 50.0, "int8": 400.0}, 10.0, 1)
COMPUTE = Work("c", "Conv", True, 1e6, Traffic(100, 400.0, 100, 400.0), seconds=1.0)
MEMORY = Work("m", "MatMul", True, 200.0, Traffic(10_000, 40_000.0, 100, 400.0), seconds=1.0)
OTHER = Work("o", "Softmax", False, 0.0, Traffic(0, 0.0, 1000, 4000.0), seconds=1.0)
NAMES = [kind.name for kind in KINDS]


def of(works: list[Work], whole: float) -> dict[str, Prospect]:
    return dict(zip(NAMES, prospects(works, whole, PEAKS), strict=True))


def test_what_computes_gains_the_ratio_of_the_peaks():
    found = of([COMPUTE], 1.0)
    assert found["int8 weights and activations"].speedup == pytest.approx(4.0)
    assert found["int8 weights only"].speedup == pytest.approx(1.0)
    assert found["2:4 sparsity"].speedup == pytest.approx(2.0)
    assert found["half of the channels"].speedup == pytest.approx(4.0)
    assert found["float16"].speedup == pytest.approx(1.0)  # slower here: it is left alone
    assert found["float16"].share == 0.0


def test_what_moves_bytes_gains_their_ratio():
    found = of([MEMORY], 1.0)
    assert found["int8 weights only"].speedup == pytest.approx(40_400 / 10_400)
    assert found["int4 weights only"].speedup == pytest.approx(40_400 / (10_000 * 4.5 / 8 + 400))
    assert found["int8 weights and activations"].speedup == pytest.approx(4.0)
    assert found["float16"].speedup == pytest.approx(2.0)


def test_the_rest_of_the_time_stays():
    found = of([COMPUTE, OTHER], 4.0)["int8 weights and activations"]
    assert found.share == pytest.approx(50.0)  # integers have a kernel for softmax
    found = of([COMPUTE], 4.0)["int8 weights and activations"]
    assert found.share == pytest.approx(25.0)
    assert found.speedup == pytest.approx(4 / (3 + 1 / 4))
    assert found.limit == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("op", "computed"),
    [("FusedConv", "float32"), ("QLinearConv", "int8"), ("FusedGemm", "float32")],
)
def test_the_kernel_tells_what_a_product_of_codes_is_computed_with(op: str, computed: str):
    """Codes of 4 bits are dequantized for a kernel of floats."""
    node = ir.node("Conv", [ir.val("x"), ir.val("w")])
    work = Work("c", "Conv", True, 1e6, Traffic(100, 50.0, 100, 50.0, True), "int8")
    (found,) = timed([(node, work)], [Kernel("k", op, 1.0, ("x",), ("y",))], {"k": [node]})
    assert (found.type, found.seconds) == (computed, 1.0)


def test_a_kernel_that_adds_a_residual_reads_it():
    x, w, r = (ir.val(name, ir.DataType.FLOAT, [2, 10]) for name in "xwr")
    product = ir.node("Conv", [x, w])
    added = ir.node("Add", [product.outputs[0], r])
    work = Work("c", "Conv", True, 1e6, Traffic(100, 400.0, 40, 160.0))
    sums = Work("a", "Add", False, 0.0, Traffic(0, 0.0, 60, 240.0))
    kernel = Kernel("k", "FusedConv", 1.0, ("x", "r"), ("y",))
    (found,) = timed([(product, work), (added, sums)], [kernel], {"k": [product, added]})
    assert found.traffic == Traffic(100, 400.0, 60, 240.0)


def test_what_is_int8_already_gains_nothing():
    done = Work("c", "Conv", True, 1e6, Traffic(100, 100.0, 100, 100.0, True), "int8", seconds=1.0)
    found = of([done], 1.0)
    assert found["int8 weights and activations"].speedup == pytest.approx(1.0)
    assert found["float16"].speedup == pytest.approx(1.0)
