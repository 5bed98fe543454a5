"""The kinds of compression, and what each takes from the work of an operator at best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.roofline.amdahl import limit, overall_speedup, roof_seconds
from compressor.roofline.peaks import Peaks
from compressor.roofline.work import Work

_INTEGER_KERNELS = frozenset(
    {
        "Add",
        "AveragePool",
        "Clip",
        "Concat",
        "Conv",
        "ConvTranspose",
        "Flatten",
        "Gemm",
        "GlobalAveragePool",
        "LeakyRelu",
        "MatMul",
        "MaxPool",
        "Mul",
        "Pad",
        "ReduceMean",
        "Relu",
        "Resize",
        "Sigmoid",
        "Slice",
        "Softmax",
        "Split",
        "Transpose",
    }
)


@dataclass(frozen=True)
class Kind:
    """A kind of compression.

    Attributes:
        name: in a few words.
        assumption: what has to be so for the speed-up.
        operations: share of the operations of layers that is left.
        weights: share of the weights that is left.
        channels: share of the activations' elements that is left.
        weight_bits: of a weight; ``None`` as it is.
        activation_bits: of an activation; ``None`` as it is.
        type: whose peak layers compute with; ``None`` as they do.
    """

    name: str
    assumption: str
    operations: float = 1.0
    weights: float = 1.0
    channels: float = 1.0
    weight_bits: float | None = None
    activation_bits: float | None = None
    type: str | None = None


KINDS = (
    Kind(
        "int8 weights and activations",
        "all layers and what lies between them compute with int8; softmax, normalization and "
        "what no integer kernel exists for stays",
        weight_bits=8,
        activation_bits=8,
        type="int8",
    ),
    Kind(
        "int8 weights only",
        "weights take a byte and are widened on the way; products stay what they are",
        weight_bits=8,
    ),
    Kind(
        "int4 weights only",
        "weights take half a byte, with scales of 16 bits for groups of 32; products stay what "
        "they are",
        weight_bits=4.5,
    ),
    Kind(
        "2:4 sparsity",
        "half of the products are left out, and weights take half their bytes and two bits for "
        "each place: a few GPUs have kernels for it, ONNX Runtime on CPUs has none",
        operations=0.5,
        weights=0.5 + 0.5 * 2 / 32,
    ),
    Kind(
        "half of the channels",
        "every layer loses half of its inputs and half of its outputs, the first and the last "
        "too: a quarter of the products and weights, half of the activations",
        operations=0.25,
        weights=0.25,
        channels=0.5,
    ),
    Kind(
        "float16",
        "weights and activations take two bytes; products reach the float16 peak that was measured",
        weight_bits=16,
        activation_bits=16,
        type="float16",
    ),
)


@dataclass(frozen=True)
class Prospect:
    """The best that a kind of compression can do for the whole model.

    Attributes:
        kind: which.
        share: percent of the time that it makes shorter.
        speedup: of the whole.
        limit: of the whole, if that share took no time at all; ``None``: no limit.
    """

    kind: Kind
    share: float
    speedup: float
    limit: float | None


def prospects(works: Sequence[Work], whole: float, peaks: Peaks) -> tuple[Prospect, ...]:
    """Say of each kind what it could bring, by the roofline and Amdahl's law.

    Each operator is taken to stay as near to its roof as it is: one that is bound by computing
    gains at most the ratio of the peaks or of the products, one that is bound by memory the ratio
    of the bytes. Nothing becomes slower.

    Args:
        works: the operators, with their times.
        whole: seconds of the whole model.
        peaks: what the machine can do.
    """
    found = []
    for kind in KINDS:
        speedups = [max(1.0, _speedup(work, kind, peaks)) for work in works]
        faster = [w.seconds or 0.0 for w, s in zip(works, speedups, strict=True) if s > 1]
        parts = [work.seconds or 0.0 for work in works]
        best = overall_speedup(whole, parts, speedups)
        found.append(Prospect(kind, 100 * sum(faster) / whole, best, limit(whole, faster)))
    return tuple(found)


def _speedup(work: Work, kind: Kind, peaks: Peaks) -> float:
    before = work.roof(peaks)
    after = roof_seconds(
        work.flops * kind.operations,
        _bytes(work, kind),
        peaks.flops[_type(work, kind)],
        peaks.bandwidth,
    )
    return before / after if before > 0 and after > 0 else 1.0


def _type(work: Work, kind: Kind) -> str:
    """Return whose peak counts; what computes with integers does not go back."""
    return work.type if kind.type is None or work.type == "int8" else kind.type


def _bytes(work: Work, kind: Kind) -> float:
    weight_bits = kind.weight_bits if work.layer else None
    weights = _narrowed(work.traffic.weight_bytes, work.traffic.weights, weight_bits)
    whole = kind.activation_bits is None or kind.activation_bits > 8
    follows = whole or work.op in _INTEGER_KERNELS
    bits = kind.activation_bits if follows else None
    activations = _narrowed(work.traffic.activation_bytes, work.traffic.activations, bits)
    return weights * (kind.weights if work.layer else 1.0) + activations * kind.channels


def _narrowed(stored: float, elements: int, bits: float | None) -> float:
    return stored if bits is None else min(stored, elements * bits / 8)
