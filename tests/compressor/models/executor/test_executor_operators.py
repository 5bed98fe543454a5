"""The operators that the torch graph executor must run: what PyTorch exports and we write."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest

from compressor.models.executor import unknown_operators
from compressor.models.executor.ops import OPERATORS
from compressor.passes.train.qat.operators import TRAINING


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXPORTED = _names(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
    BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow
    Cast CastLike Ceil Celu Clip Col2Im Compress Concat ConstantOfShape Conv ConvTranspose
    Cos Cosh CumSum DFT DeformConv DepthToSpace DequantizeLinear Det Div Dropout Einsum Elu
    Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm
    Greater GreaterOrEqual GridSample GroupNormalization HammingWindow HannWindow
    HardSigmoid HardSwish Identity If InstanceNormalization IsInf IsNaN LSTM
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop MatMul Max MaxPool Min
    Mish Mod Mul Neg NonMaxSuppression NonZero Not Or PRelu Pad Pow QuantizeLinear
    RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum Relu Reshape Resize RoiAlign RotaryEmbedding Round STFT
    Scan ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Sinh Size Slice Softmax
    Softplus Split Sqrt Squeeze Sub Tan Tanh Tile TopK Transpose Trilu Unique Unsqueeze
    Where Xor
    """
)
"""What ``torch.onnx.export(dynamo=True)`` can write, of PyTorch 2.13."""

NOT_RUN = {
    "Bernoulli": "random",
    "ConcatFromSequence": "a sequence is no tensor",
    "MaxRoiPool": "of one deprecated function of torchvision",
    "Multinomial": "random",
    "NegativeLogLikelihoodLoss": "training",
    "RandomNormalLike": "random",
    "RandomUniformLike": "random",
    "SequenceAt": "a sequence is no tensor",
    "SequenceEmpty": "a sequence is no tensor",
    "SequenceInsert": "a sequence is no tensor",
    "SequenceMap": "a sequence is no tensor",
    "SoftmaxCrossEntropyLoss": "training",
    "SplitToSequence": "a sequence is no tensor",
}
"""What it can write beside, which ONNX Runtime has to run."""

WRITTEN = {
    "": _names(
        """
    Add AveragePool Cast Clip Concat ConvInteger DequantizeLinear Div DynamicQuantizeLinear
    Erf Exp Flatten Gather Gelu Gemm GlobalAveragePool Greater GreaterOrEqual Identity If
    LayerNormalization LogSoftmax MatMul MatMulInteger Mul NonZero Not Pad Pow
    QuantizeLinear Reciprocal ReduceMax ReduceMean ReduceSum Relu Reshape ScatterND Shape
    Size Slice Softmax Sqrt Sub Tanh TopK Transpose Unsqueeze Where
    """
    ),
    "com.microsoft": frozenset({"MatMulNBits"}),
    "compressor.training": _names(
        """
    BatchNormalization ChannelShift FakeQuantize FoldingFactor NormShift PadChannels
    RoundBias
    """
    ),
}
"""What our passes and exporters write, and what graphs that are trained hold, by domain."""

COMMON = _names(
    """
    GlobalMaxPool LRN Mean OneHot RNN ReduceLogSum ReduceSumSquare Shrink
    SimplifiedLayerNormalization Softsign SpaceToDepth Sum SwiGLU Swish ThresholdedRelu
    """
)
"""What ONNX files of others often hold, and takes a few lines."""


@pytest.mark.parametrize("domain", WRITTEN)
def test_what_we_write_is_run(domain: str) -> None:
    names = {name for of, name in (*OPERATORS, *TRAINING) if of == domain}
    assert WRITTEN[domain] <= names


def test_what_pytorch_exports_is_run() -> None:
    assert not unknown_operators(("", name) for name in sorted(EXPORTED | {"Constant"}))
    assert unknown_operators(("", name) for name in NOT_RUN) == tuple(NOT_RUN)


def test_nothing_else_is_kept() -> None:
    standard = {name for domain, name in OPERATORS if not domain}
    assert standard == EXPORTED | WRITTEN[""] | COMMON


def test_the_exporter_has_no_other_operators() -> None:
    """An operator that a later PyTorch writes has to be put into one of the lists."""
    names = {schema.name for schema in onnx.defs.get_all_schemas()}
    written: set[str] = set()
    for package in (
        "torch.onnx._internal.exporter._torchlib",
        "onnxscript.function_libs.torch_lib",
    ):
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        for source in Path(spec.submodule_search_locations[0]).rglob("*.py"):
            text = source.read_text(encoding="utf-8")
            called = re.findall(r"\bop(?:set)?\d*\.([A-Z]\w+)\(", text)
            written |= names & {*called, *re.findall(r'"([A-Z]\w+)"', text)}
    assert len(written) > 100
    assert written <= EXPORTED | NOT_RUN.keys() | {"Constant"}


def test_names_of_unknown_operators() -> None:
    operators = [("", "Relu"), ("ai.onnx", "Add"), ("mine", "Relu"), ("", "LpPool"), ("", "LpPool")]
    assert unknown_operators(operators) == ("mine.Relu", "LpPool")
