"""Keep codes of weights between the passes of a run: one safetensors file and its description."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compressor.carriers.writing import system_errors
from compressor.types.layers import Layer
from compressor.types.quantized import QuantizedTensor, Scheme, WeightCodes

_CODES = "codes.safetensors"
_PARTS = ("codes", "scale", "zero_point")
_OPTIONAL = ("tensor_scale", "codebook")


def save_codes(
    codes: Mapping[str, WeightCodes], weight: Callable[[Layer], torch.Tensor], directory: Path
) -> None:
    """Compute codes and write them; nothing is written where there are none.

    Args:
        codes: by the weight's name.
        weight: returns a layer's float weight in its stored shape.
        directory: where the file goes.
    """
    if not codes:
        return
    tensors: dict[str, torch.Tensor] = {}
    described = {}
    for name, entry in codes.items():
        found = entry.compute(entry.layer.canonical(weight(entry.layer)))
        tensors |= {f"{name}:{part}": getattr(found, part).contiguous() for part in _PARTS}
        others = {part: getattr(found, part) for part in _OPTIONAL}
        tensors |= {f"{name}:{k}": v.contiguous() for k, v in others.items() if v is not None}
        described[name] = {"layer": asdict(entry.layer), "scheme": asdict(found.scheme)}
    with system_errors():
        save_file(tensors, directory / _CODES, {"codes": json.dumps(described)})


def load_codes(directory: Path) -> dict[str, WeightCodes]:
    """Return the codes that were saved there; tensors stay memory-mapped."""
    path = directory / _CODES
    if not path.is_file():
        return {}
    found = {}
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["codes"])
        names = set(file.keys())
        for name, entry in described.items():
            parts = {part: file.get_tensor(f"{name}:{part}") for part in _PARTS}
            parts |= {
                part: file.get_tensor(f"{name}:{part}")
                for part in _OPTIONAL
                if f"{name}:{part}" in names
            }
            stored = QuantizedTensor(**parts, scheme=Scheme(**entry["scheme"]))
            found[name] = known_codes(_layer(entry["layer"]), stored)
    return found


def known_codes(layer: Layer, stored: QuantizedTensor) -> WeightCodes:
    """Return codes that need not be found any more."""

    def compute(_: torch.Tensor) -> QuantizedTensor:
        return stored

    return WeightCodes(layer, stored.scheme, compute)


def _layer(value: Mapping[str, object]) -> Layer:
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return Layer(**lists)  # type: ignore[arg-type]  # as asdict made it
