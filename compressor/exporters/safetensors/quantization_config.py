"""The ``quantization_config`` of the compressed-tensors layout: schemes, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from compressor.errors import SpecError
from compressor.exporters.safetensors.compressed_tensors import (
    SCALE_DTYPES,
    packs_zero_points,
    stored_entries,
    unpacked,
)
from compressor.models.layer_uses import OUTPUT_LAYERS
from compressor.models.transformers.reading import Reading, reading_of
from compressor.types.carrier import Carrier
from compressor.types.layers import Scheme, StoredTensor
from compressor.types.rounded_inputs import CacheScheme, InputScheme

_WEIGHT = ".weight"
_OUTPUT_LAYERS = ("lm_head", "lm_head.decoder", "cls.predictions.decoder")
"""Modules of transformers' classes whose weight is a table's: checkpoints do not name them."""
_MATRIX = 2
_CACHED = InputScheme("fp8-e4m3", static=True)
"""What keys and values are rounded to; the layout has no place for others."""
_MENTIONED = 0.05  # of all bytes


def quantization_config(
    tensors: Mapping[str, StoredTensor],
    reading: Reading | None = None,
    caches: Mapping[str, CacheScheme] = MappingProxyType({}),
) -> dict[str, Any]:
    """Make the ``quantization_config`` of a model's ``config.json``.

    Args:
        tensors: everything that its checkpoint holds, by name; layers that are kept become
            ``ignore``.
        reading: how ``transformers`` will read them; if it is not known, modules are taken to be
            called as the checkpoint's tensors.
        caches: how attention rounds what it keeps.

    Raises:
        SpecError: no tensor is quantized; the layout has no form for one; or ``transformers``
            could not run the mixture.
    """
    quantized = [tensor for tensor in tensors.values() if tensor.codes is not None]
    if not quantized:
        remedy = "add the pass quantize-weights"
        raise SpecError("layout compressed-tensors", "no layer is quantized", remedy)
    groups: dict[str, tuple[dict[str, Any], list[StoredTensor]]] = {}
    for tensor in quantized:
        stored_entries(tensor)  # raises where there is no form
        scheme = _scheme(tensor)
        inputs = _inputs(tensor)
        key = str((_arguments(scheme), inputs))
        groups.setdefault(key, (_group(tensor, scheme, inputs), []))[1].append(tensor)
    matrices = [
        tensor
        for tensor in tensors.values()
        if len(tensor.shape) == _MATRIX and tensor.name.endswith(_WEIGHT)
    ]
    paths = {t.name: t.name.removesuffix(_WEIGHT) for t in matrices}
    if reading is not None:
        paths = {name: reading.module(name) for name in paths}
        _check_experts([t for t in matrices if t.name in reading.merged], quantized)
        _check_joined(sorted(reading.joined & tensors.keys()), quantized)
    modules = list(paths.values())
    for group, members in groups.values():
        # One group can target a class of layers; tables and several groups are named one by one,
        # and output layers too, for which vLLM has a class of its own.
        named = [t for t in members if len(groups) > 1 or _is_table(t) or _is_output(t)]
        group["targets"] = ["Linear"] if len(groups) == 1 else []
        group["targets"] += _patterns([paths[t.name] for t in named], modules)
    formats = {group["format"] for group, _ in groups.values()}
    config = {
        "config_groups": {f"group_{i}": group for i, (group, _) in enumerate(groups.values())},
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": _ignored(matrices, _tied_layers(tensors), paths, reading),
        "kv_cache_scheme": _input_arguments(_CACHED) if caches else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    if _needs_dequantizing(quantized, len(groups), reading):
        _check_floats_in(quantized)
        if caches:
            raise SpecError(
                "pass quantize-cache",
                "finds scales that transformers does not read where it has to dequantize weights",
                "leave out the pass, or use preset int8 or fp8",
            )
        config["dequantize"] = True
    return config


def _ignored(
    matrices: Sequence[StoredTensor],
    tied: Sequence[str],
    paths: Mapping[str, str],
    reading: Reading | None,
) -> list[str]:
    """Return the layers that are kept, as checkpoint and class call them, in patterns.

    Args:
        tied: layers without a tensor, by the names that are usual.
        paths: the module that each matrix becomes a part of, by the tensor's name.
    """
    names = [t.name.removesuffix(_WEIGHT) for t in matrices]
    kept = [t.name.removesuffix(_WEIGHT) for t in matrices if t.codes is None] + [*tied]
    if reading is not None:
        modules = [paths[t.name] for t in matrices if t.codes is None] + [*reading.linear]
        taken = {*kept, *(paths[t.name] for t in matrices if t.codes is not None)}
        kept += dict.fromkeys(path for path in modules if path not in taken)
        names = [*dict.fromkeys([*names, *paths.values(), *reading.linear])]
    return _patterns(kept, names)


def float_shares(carrier: Carrier) -> tuple[str, ...]:
    """Return which share of the written bytes belongs to modules that are not linear layers.

    Such are experts in one tensor of three axes. Convolutions and tables are not mentioned.
    """
    reading = reading_of(carrier)
    tensors = carrier.tensors()
    if reading is None or all(tensor.codes is None for tensor in tensors.values()):
        return ()
    total = sum(tensor.nbytes for tensor in tensors.values())
    kept: dict[str, int] = {}
    for tensor in tensors.values():
        owner = reading.owner(tensor.name)
        if tensor.codes is None and len(tensor.shape) >= _MATRIX and owner:
            kept[owner] = kept.get(owner, 0) + tensor.nbytes
    return tuple(
        f"{100 * size / total:.0f} % of the bytes stay float: {owner} holds its weights in "
        "parameters of its own, for which the layout has no codes; a spec with model.factory and "
        "the passes fuse and quantize-weights stores them as codes in an ONNX file"
        for owner, size in kept.items()
        if size >= _MENTIONED * total
    )


def _scheme(tensor: StoredTensor) -> Scheme:
    if tensor.codes is None:
        raise ValueError(f"{tensor.name} is not quantized")
    return tensor.codes.scheme


def _inputs(tensor: StoredTensor) -> dict[str, Any] | None:
    """Describe how a layer's inputs are rounded; ``None`` where they are not."""
    inputs = None if tensor.codes is None else tensor.codes.inputs
    return None if inputs is None else _input_arguments(inputs)


def _input_arguments(inputs: InputScheme) -> dict[str, Any]:
    strategy = "tensor" if inputs.static else "token"
    arguments: dict[str, Any] = {
        "num_bits": inputs.bits,
        "type": "int" if inputs.format == "int8" else "float",
        "symmetric": True,
        "strategy": {"nvfp4": "tensor_group", "mxfp4": "group"}.get(inputs.format, strategy),
        "group_size": inputs.group,
        # The scales of nvfp4's groups are found as the model runs, that of the tensor is stored.
        "dynamic": "local" if inputs.format == "nvfp4" else not inputs.static,
    }
    if inputs.group:
        kind = str(SCALE_DTYPES["e4m3" if inputs.format == "nvfp4" else "e8m0"])
        arguments |= {"scale_dtype": kind, "zp_dtype": kind}
    return arguments


def _group(tensor: StoredTensor, scheme: Scheme, inputs: dict[str, Any] | None) -> dict[str, Any]:
    form = "int-quantized" if unpacked(tensor) else "pack-quantized"
    if scheme.element == "e4m3":
        form = "float-quantized"
    elif scheme.element == "e2m1":
        form = f"{'nv' if scheme.scale_type == 'e4m3' else 'mx'}fp4-pack-quantized"
    return {
        "targets": [],
        "weights": _arguments(scheme),
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def _arguments(scheme: Scheme) -> dict[str, Any]:
    """Describe a scheme as a reader sees it: equal descriptions make one group."""
    grouped = scheme.granularity == "group"
    nvfp4 = scheme.element == "e2m1" and scheme.scale_type == "e4m3"
    arguments: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.element == "int" else "float",
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if nvfp4 else scheme.granularity,
        "group_size": scheme.group if grouped else None,
        "dynamic": False,
    }
    if scheme.element == "e2m1":
        kind = str(SCALE_DTYPES[scheme.scale_type])
        arguments |= {"scale_dtype": kind, "zp_dtype": kind}
    return arguments


def _is_table(tensor: StoredTensor) -> bool:
    return tensor.codes is not None and tensor.codes.layer.is_table


def _is_output(tensor: StoredTensor) -> bool:
    return tensor.name.removesuffix(_WEIGHT).rpartition(".")[2] in OUTPUT_LAYERS


def _tied_layers(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return output layers that are not in the file, and would be taken for quantized ones."""
    tied = []
    for layer in _OUTPUT_LAYERS:
        parent = layer.rpartition(".")[0]
        inside = f"{parent}{_WEIGHT}" not in tensors and any(
            name.startswith(f"{parent}.") for name in tensors
        )
        if f"{layer}{_WEIGHT}" not in tensors and (inside or not parent):
            tied.append(layer)
    return tied


def _patterns(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Merge names into regular expressions over layer numbers where no other module matches."""
    by_pattern: dict[str, set[str]] = {}
    for module in modules:
        by_pattern.setdefault(_numberless(module), set()).add(module)
    all_names = set(names)
    merged: dict[str, None] = {}
    for name in names:
        pattern = _numberless(name)
        alike = by_pattern.get(pattern, {name})
        merged[pattern if len(alike) > 1 and alike <= all_names else name] = None
    return list(merged)


def _numberless(name: str) -> str:
    """Return a regular expression for a name with any layer numbers."""
    parts = [r"\d+" if part.isdecimal() else re.escape(part) for part in name.split(".")]
    return f"re:{re.escape('.').join(parts)}$"


def _needs_dequantizing(
    quantized: Sequence[StoredTensor], groups: int, reading: Reading | None
) -> bool:
    """Return whether ``transformers`` must be asked to dequantize weights while it loads them.

    Otherwise it loads codes and decompresses them in the first run, which fails for some schemes,
    and for classes that set up weights that are not there yet. When asked to dequantize, it
    assumes that all layers have the first scheme.

    Raises:
        SpecError: there are several schemes.
    """
    for tensor in quantized:
        remedy = _remedy(tensor)
        if remedy and groups > 1:
            raise SpecError(
                f"layer {tensor.name.removesuffix(_WEIGHT)!r}",
                f"is {_scheme(tensor)} beside layers of other schemes, which transformers cannot "
                "load together",
                f"use one scheme for all layers, or {remedy}",
            )
        if remedy:
            return True
    packed = [t.name for t in quantized if not unpacked(t)]
    if reading is None or not reading.initializes(packed):
        return False
    if groups > 1:
        raise SpecError(
            f"class {reading.class_name!r}",
            "sets up weights that packed layers do not have, and transformers can dequantize "
            "layers of one scheme only",
            "use one scheme for all layers, or fp8",
        )
    return True


def _check_floats_in(quantized: Sequence[StoredTensor]) -> None:
    """Check that no inputs are rounded where ``transformers`` dequantizes weights.

    It would then leave inputs as they are, and read no scales for them.

    Raises:
        SpecError: some are.
    """
    for tensor in quantized:
        if tensor.codes is not None and tensor.codes.inputs is not None:
            raise SpecError(
                f"layer {tensor.name.removesuffix(_WEIGHT)!r}",
                f"has {tensor.codes.inputs}, which transformers cannot round in this model",
                f"use fp8-w8a8 or int8-w8a8, or {_remedy(tensor) or 'skip the layer'}",
            )


def _remedy(tensor: StoredTensor) -> str:
    """Return what would let ``transformers`` decompress a weight; empty where it does already.

    With compressed-tensors 0.20, a table loses the weight that ``transformers`` sets up, packed
    zero points have no place, and 4-bit floats become bfloat16 whatever the model's type is.
    """
    scheme = _scheme(tensor)
    if _is_table(tensor):
        return "keep the table as it is"
    if packs_zero_points(scheme):
        return "make it symmetric"
    wider = scheme.element == "e2m1" and tensor.dtype != torch.bfloat16
    return "give a bfloat16 model" if wider else ""


def _check_joined(joined: Sequence[str], quantized: Sequence[StoredTensor]) -> None:
    """Check that ``transformers`` loads floats that it joins, such as convolutions of q, k and v.

    It first takes packed codes apart, and gives on only these; 8-bit floats it leaves where they
    are.

    Args:
        joined: names of what a class joins.

    Raises:
        SpecError: it would leave them out.
    """
    if joined and any(_scheme(tensor).element != "e4m3" for tensor in quantized):
        raise SpecError(
            f"tensor {joined[0]!r}",
            "is joined with others when transformers loads it, which loses floats beside integer "
            "codes",
            "use preset fp8, or write a spec with model.factory and the export format onnx",
        )


def _check_experts(weights: Sequence[StoredTensor], quantized: Sequence[StoredTensor]) -> None:
    """Check that ``transformers`` can stack the weights of single experts as it loads them.

    It dequantizes them by one scheme without zero points, and where that has packed codes it
    leaves float weights out.

    Args:
        weights: those of the experts.
        quantized: all that are stored as codes.

    Raises:
        SpecError: it cannot.
    """
    schemes = {None if t.codes is None else t.codes.scheme for t in weights}
    others = {_scheme(t) for t in quantized}
    subject = f"expert {weights[0].name.removesuffix(_WEIGHT)!r}" if weights else ""
    if len(schemes) > 1 or (weights and len(others) > 1):
        kept = next((t.name for t in weights if t.codes is None), "")
        beside = f", and {kept.removesuffix(_WEIGHT)!r} stays float" if kept else ""
        raise SpecError(
            subject,
            f"cannot be read, as transformers loads all experts with one scheme{beside}",
            "use one scheme that fits all layers, such as preset int8, and skip none of them",
        )
    inputs = [t.codes.inputs for t in weights if t.codes is not None]
    if any(each is not None and each.calibrated for each in inputs):
        raise SpecError(
            subject,
            "has a stored scale of its inputs, which transformers does not read for experts",
            "use a scale for each token, or --skip the experts",
        )
    if any(
        t.codes is not None and t.codes.scheme.element == "int" and unpacked(t) for t in weights
    ):
        raise SpecError(
            subject,
            "would be integers that are not packed, which transformers does not stack",
            "use preset fp8-w8a8, or one that quantizes only weights",
        )
    for scheme in schemes:
        if scheme is None and all(other.element == "e4m3" for other in others):
            continue
        remedy = "use preset int8, int4-g128, int4-g32 or fp8"
        if scheme is None:
            problem = "stays float, and transformers cannot stack it beside packed layers"
            remedy = "use preset fp8, or int8, which divides any width, and skip no experts"
        elif (
            scheme.element == "e2m1"
            or not scheme.symmetric
            or (scheme.element == "e4m3" and scheme.granularity == "group")
        ):
            problem = f"would be {scheme}, which transformers does not load for experts"
        else:
            continue
        raise SpecError(subject, problem, remedy)
