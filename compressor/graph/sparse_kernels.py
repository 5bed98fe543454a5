"""What targets gain from zeros in weights, by what they document and what was measured."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType

DENSE = ""


@dataclass(frozen=True)
class SparseKernels:
    """A target's kernels for weights with zeros.

    Attributes:
        runtime: its name in messages.
        patterns: those that its kernels read, such as ``2:4``; none if it multiplies with zeros.
        condition: when it uses these kernels.
        source: where that is documented, or how it was measured.
    """

    runtime: str
    patterns: frozenset[str] = frozenset()
    condition: str = ""
    source: str = ""


SPARSE_KERNELS = MappingProxyType(
    {
        # Measured with 1.31 on one core: a 3x3 convolution of 128 channels took 1.28 ms dense,
        # 1.29 with 2:4 and 1.25 with 90 % zeros; a product with 1024 x 1024 weights 0.56, 0.56 and
        # 0.57. Sparse initializers become dense when a model is loaded.
        "ort-cpu": SparseKernels("ONNX Runtime", source="onnxruntime, issue 5578, and measured"),
        # Measured with 2026.4 on one core, both with CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE at its
        # default of 1, which never unpacks, and at 0.5: 0.82 to 0.83 ms and 0.14 to 0.15 ms.
        "openvino": SparseKernels("OpenVINO", source="measured"),
        "tensorrt": SparseKernels(
            "TensorRT",
            frozenset({"2:4"}),
            "in float16 or int8, where they are the faster ones, with builder: gpu and "
            "sparse-weights: true",
            "TensorRT Developer Guide, Structured Sparsity",
        ),
    }
)
"""By target; of others, such as ``ort-cuda``, nothing is known here."""


def sparse_notes(targets: Collection[str], patterns: Collection[str]) -> tuple[str, ...]:
    """Return what pruned weights gain on each target, one sentence each.

    >>> sparse_notes(["tensorrt"], ["1:4"])
    ('TensorRT has sparse kernels for 2:4 only; it computes 1:4 densely',)

    Args:
        patterns: those of the pruned layers, such as ``2:4``; ``""`` for single weights or blocks.
    """
    notes = []
    for target, kernels in SPARSE_KERNELS.items():
        if target not in targets or not patterns:
            continue
        read = sorted(kernels.patterns)
        if not read:
            notes.append(
                f"{kernels.runtime} also multiplies zeros: they shrink a file that omits them, but "
                "make nothing faster; prune-structured does"
            )
            continue
        others = sorted({pattern or "single weights" for pattern in patterns} - kernels.patterns)
        if others:
            notes.append(
                f"{kernels.runtime} has sparse kernels for {', '.join(read)} only; it computes "
                f"{', '.join(others)} densely"
            )
        if not kernels.patterns.isdisjoint(patterns):
            notes.append(f"{kernels.runtime} uses kernels for {read[0]} {kernels.condition}")
    return tuple(notes)
