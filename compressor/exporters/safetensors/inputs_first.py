"""The layouts of GPTQ and AWQ: which tensors a quantized weight becomes.

Servers that read neither compressed-tensors nor GGUF read one of these. Both store the transpose of
a weight ``[rows, columns]``, of which zero points are part:

- ``gptq``: ``qweight`` int32 ``[columns * bits / 32, rows]``, codes of a row packed along it, the
  lowest bits first; ``qzeros`` int32 ``[groups, rows * bits / 32]``; ``scales`` ``[groups, rows]``;
  and ``g_idx`` int32 ``[columns]``, the group of each column. Symmetric weights have the zero
  point in the middle, and 1 less is stored (``checkpoint_format: gptq``), as the first programs did
  it; others have what they are (``gptq_v2``).
- ``awq``: ``qweight`` int32 ``[columns, rows / 8]`` and ``qzeros`` int32 ``[groups, rows / 8]``,
  eight rows in a word in the order 0, 2, 4, 6, 1, 3, 5, 7; and ``scales`` ``[groups, rows]``.

Layers that stay float are named three times, as readers look in different places: ``dynamic`` for
GPTQModel and vLLM, ``modules_in_block_to_quantize`` for transformers with Optimum, and
``modules_to_not_convert`` for transformers and vLLM where the layout is ``awq``.

Sources: the readers of vLLM 0.32 (``auto_gptq.py``, ``auto_awq.py``), GPTQModel 7.7 and Optimum
2.3 (``gptq/quantizer.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from compressor.errors import SpecError
from compressor.exporters.safetensors.compressed_tensors import (
    SCALE_DTYPES,
    Entry,
    stored_entries,
)
from compressor.models.codec.bit_stream import pack_words
from compressor.models.layer_uses import OUTPUT_LAYERS
from compressor.types.layers import QuantizedTensor, Scheme, StoredTensor

InputsFirst = Literal["gptq", "awq"]

_WEIGHT = ".weight"
_MATRIX = 2
_WORD = 32
_BITS: Mapping[InputsFirst, tuple[int, ...]] = {"gptq": (8, 4, 2), "awq": (4,)}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_BLOCK = re.compile(r"^.*?\.\d+\.")  # what comes before the name of a module in its block


def entries_of(kind: InputsFirst, tensor: StoredTensor) -> tuple[Entry, ...]:
    """Describe what a tensor is stored as.

    Raises:
        SpecError: the layout has no form for it.
    """
    if tensor.codes is None:
        return stored_entries(tensor)
    scheme = tensor.codes.scheme
    problem, remedy = _problem(kind, tensor, scheme)
    base = tensor.name.removesuffix(_WEIGHT)
    if problem:
        raise SpecError(f"layer {base!r}", f"{problem}, which {kind} cannot store", remedy)
    rows, columns = tensor.shape
    groups, factor = scheme.groups(columns), _WORD // scheme.bits
    packed = (columns // factor, rows) if kind == "gptq" else (columns, rows // factor)
    made = (
        Entry(f"{base}.qweight", torch.int32, packed),
        Entry(f"{base}.qzeros", torch.int32, (groups, rows // factor)),
        Entry(f"{base}.scales", SCALE_DTYPES[scheme.scale_type], (groups, rows)),
    )
    return (*made, Entry(f"{base}.g_idx", torch.int32, (columns,))) if kind == "gptq" else made


def tensors_of(
    kind: InputsFirst, tensor: StoredTensor, codes: QuantizedTensor
) -> dict[str, torch.Tensor]:
    """Compute the tensors stored in place of a quantized weight.

    Args:
        codes: those of the whole weight.

    Returns:
        Contiguous tensors in the order and with the dtypes of :func:`entries_of`.
    """
    scheme = codes.scheme
    # The least code of so many bits counts as 0.
    offset = 1 << (scheme.bits - 1) if scheme.signed else 0
    levels = (codes.codes.to(torch.int16) + offset).to(torch.uint8)
    less = 1 if kind == "gptq" and scheme.symmetric else 0
    zeros = (codes.zero_point.to(torch.int16) + (offset - less)).to(torch.uint8).T
    if kind == "gptq":
        qweight, qzeros = pack_words(levels, scheme.bits).T, pack_words(zeros, scheme.bits)
    else:
        order = torch.arange(len(levels)).reshape(-1, len(_AWQ_ORDER))[:, _AWQ_ORDER].flatten()
        qweight, qzeros = (pack_words(x[:, order], scheme.bits) for x in (levels.T, zeros))
    columns = torch.arange(levels.shape[1])
    values = (qweight, qzeros, codes.scale.T, columns // (scheme.group or len(columns)))
    return {
        entry.name: value.to(entry.dtype).contiguous()
        for entry, value in zip(entries_of(kind, tensor), values, strict=False)
    }


def configuration(kind: InputsFirst, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Make the ``quantization_config`` of a model's ``config.json``.

    Raises:
        SpecError: no tensor is quantized, or not all by one scheme; scales may have several types,
            as the weights of a model may, and readers cast both.
    """
    schemes: dict[str, tuple[Scheme, str]] = {}
    for tensor in tensors.values():
        if tensor.codes is not None:
            scheme, name = tensor.codes.scheme, tensor.name.removesuffix(_WEIGHT)
            schemes.setdefault(str(scheme), (scheme, name))
    if not schemes:
        raise SpecError(f"layout {kind}", "no layer is quantized", "add the pass quantize-weights")
    if len(schemes) > 1:
        (first, one), (second, other) = list(schemes.values())[:2]
        raise SpecError(
            f"layer {other!r}",
            f"is {second}, {one!r} is {first}, and {kind} has one scheme for all",
            "use one scheme for all layers, or layout: compressed-tensors",
        )
    ((scheme, _),) = schemes.values()
    chosen = [name.removesuffix(_WEIGHT) for name, t in tensors.items() if t.codes is not None]
    kept = _kept(list(tensors.values()))
    common = {
        "bits": scheme.bits,
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in kept},
        "group_size": scheme.group or -1,
        "quant_method": kind,
    }
    if kind == "awq":
        return {**common, "modules_to_not_convert": kept, "version": "gemm", "zero_point": True}
    return {
        **common,
        "checkpoint_format": "gptq" if scheme.symmetric else "gptq_v2",
        "desc_act": False,
        "lm_head": False,
        "modules_in_block_to_quantize": [_endings(chosen, kept)],
        "sym": scheme.symmetric,
    }


def _kept(tensors: Sequence[StoredTensor]) -> list[str]:
    """Return the modules with a matrix that stays float."""
    return [
        tensor.name.removesuffix(_WEIGHT)
        for tensor in tensors
        if tensor.codes is None and len(tensor.shape) == _MATRIX and tensor.name.endswith(_WEIGHT)
    ]


def _endings(chosen: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Return endings of names that tell modules of codes from others.

    Optimum reads no ``dynamic``: it takes all linear layers of blocks for codes, unless their
    names end otherwise. vLLM looks for these endings anywhere in a name.
    """
    inside = {name: _IN_BLOCK.sub("", name) for name in (*chosen, *kept)}
    floats = {inside[name] for name in kept}
    return list(dict.fromkeys(name if inside[name] in floats else inside[name] for name in chosen))


def _problem(kind: InputsFirst, tensor: StoredTensor, scheme: Scheme) -> tuple[str, str]:
    """Return why a layout cannot hold a weight, and what to do; empty where it can."""
    assert tensor.codes is not None
    layer = tensor.codes.layer
    skip = "skip the layer by a rule"
    if layer.is_table or layer.name.rpartition(".")[2] in OUTPUT_LAYERS:
        # Readers look for codes in blocks.
        kept = "a table" if layer.is_table else "the output layer"
        return f"it is {kept}", f"leave out embeddings, or {skip}"
    if not tensor.name.endswith(_WEIGHT) or len(tensor.shape) != _MATRIX or layer.transposed:
        return "it has no weight that is a matrix of output channels by inputs", skip
    otherwise = f"use preset int4-g128, or {skip}"
    if tensor.codes.inputs is not None:
        return f"it has {tensor.codes.inputs}", otherwise
    spans = scheme.granularity in ("group", "channel")
    if scheme.element != "int" or scheme.bits not in _BITS[kind] or not spans:
        return f"its scheme is {scheme}", otherwise
    if scheme.scale_type not in ("float16", "bfloat16"):
        return f"its scales are {scheme.scale_type}", otherwise
    factor = _WORD // scheme.bits
    if any(size % factor for size in tensor.shape):
        rows, columns = tensor.shape
        return f"its {rows} rows and {columns} columns do not fill words", skip
    return "", ""
