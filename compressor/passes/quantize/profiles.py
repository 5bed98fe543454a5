"""Where a runtime fuses Q/DQ into integer kernels, one small table a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profile:
    """What a runtime does with quantized tensors.

    Attributes:
        layers: operators with a constant weight that have an integer kernel.
        output_needed: those whose integer kernel exists only with a quantized output.
        joins: operators without a weight that have an integer kernel, if all that they read and
            write is quantized.
        carriers: operators that move elements and so work on codes as they are.
        absorbed: activations that the kernel before them takes in.
        integer_bias: biases are stored as int32 codes.
        explicit_zero: operators whose integer kernel wants the weight's zero point written out.
        unsigned: asymmetric activations are uint8; where false, activations must be symmetric.
        kept: why an operator stays in floating point.
    """

    layers: frozenset[str]
    output_needed: frozenset[str]
    joins: frozenset[str]
    carriers: frozenset[str]
    absorbed: frozenset[str]
    integer_bias: bool
    unsigned: bool
    explicit_zero: frozenset[str] = frozenset()
    kept: Mapping[str, str] = field(default_factory=dict)


# ONNX Runtime, CPU provider: QLinearConv, QGemm, MatMulIntegerToFloat, QLinearAdd/Mul/Concat,
# QLinearAveragePool/GlobalAveragePool, QLinearSigmoid/LeakyRelu. Relu and Clip before a
# QuantizeLinear are dropped, since saturation does the same.
ORT_CPU = Profile(
    layers=frozenset({"Conv", "Gemm", "MatMul"}),
    output_needed=frozenset({"Conv"}),
    joins=frozenset(
        {"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "Sigmoid", "LeakyRelu"}
    ),
    carriers=frozenset(
        {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Pad"}
    ),
    absorbed=frozenset({"Relu", "Clip"}),
    integer_bias=True,
    unsigned=True,
    explicit_zero=frozenset({"Gemm"}),
    kept={"ConvTranspose": "ONNX Runtime has no integer kernel for it"},
)

# TensorRT: explicit quantization; the builder moves Q/DQ over data movement by itself, adds a
# residual in the convolution's epilogue, and wants float biases and zero points 0.
TENSORRT = Profile(
    layers=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    output_needed=frozenset(),
    joins=frozenset({"Add", "AveragePool", "GlobalAveragePool"}),
    carriers=frozenset(),
    absorbed=frozenset({"Relu"}),
    integer_bias=False,
    unsigned=False,
)

# OpenVINO, CPU plugin 2026.4, by the precisions that its compiled model reports for ResNet-20: a
# layer with a float output is int8 all the same, and a residual sum goes into the convolution
# before it. Biases in float save it a conversion.
OPENVINO = Profile(
    layers=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    output_needed=frozenset(),
    joins=frozenset({"Add", "Concat", "AveragePool", "GlobalAveragePool"}),
    carriers=ORT_CPU.carriers,
    absorbed=frozenset({"Relu", "Clip"}),
    integer_bias=False,
    unsigned=True,
)

# ONNX Runtime, CUDA provider: it has kernels for Q/DQ and none for products of integers, so that
# every Q/DQ that is not there is time saved; int32 biases would be computed on the CPU.
ORT_CUDA = Profile(
    layers=frozenset({"Conv", "Gemm", "MatMul"}),
    output_needed=frozenset(),
    joins=frozenset(),
    carriers=frozenset(),
    absorbed=frozenset({"Relu"}),
    integer_bias=False,
    unsigned=True,
    kept={"ConvTranspose": "ONNX Runtime has no integer kernel for it"},
)

PROFILES: Mapping[str, Profile] = {
    "tensorrt": TENSORRT,
    "ort-cpu": ORT_CPU,
    "openvino": OPENVINO,
    "ort-cuda": ORT_CUDA,
}
"""By target; what suits one suits all that come after it."""


def profile_for(targets: frozenset[str]) -> Profile:
    """Return the rules to follow: the strictest of the targets', ONNX Runtime's without one."""
    named = (profile for target, profile in PROFILES.items() if target in targets)
    return next(named, ORT_CPU)
