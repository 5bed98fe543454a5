"""Stored results of a pass for a stage of blocks: codes and floats in a file, the rest as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compressor.models.checkpoint.weight_files import read_weights
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.run.weight_pass import Changes
from compressor.types.carrier import WeightChange
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.passes import LayerOutcome
from compressor.types.rounded_inputs import InputScheme

_PARTS = ("codes", "scale", "zero_point", "tensor_scale")
_SEPARATOR = "|"  # between a parameter's name and a part's


def saved(changes: Changes, carrier: BlockCheckpoint, path: Path) -> dict[str, Any]:
    """Write changed weights into a file, and return the rest of the result as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    schemes: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    for name, change in changes.weights.items():
        assert not isinstance(change, WeightChange)
        if isinstance(change, torch.Tensor):
            tensors[name] = change.contiguous()
            continue
        codes = change.read(carrier.weight)
        schemes[name] = asdict(codes.scheme)
        if change.inputs is not None:
            inputs[name] = asdict(change.inputs)
        for part in _PARTS:
            value = getattr(codes, part)
            if value is not None:
                tensors[f"{name}{_SEPARATOR}{part}"] = value.contiguous()
    save_file(tensors, path)
    outcomes = [asdict(outcome) for outcome in changes.outcomes.values()]
    return {
        "schemes": schemes,
        "inputs": inputs,
        "outcomes": outcomes,
        "notes": list(changes.notes),
        "spans": changes.spans,
    }


@dataclass(frozen=True)
class StoredCodes:
    """Reads a weight's codes from a file."""

    path: Path
    name: str
    scheme: Scheme

    def __call__(self, _: torch.Tensor) -> QuantizedTensor:
        """Return the codes of the whole weight; its float values are not looked at."""
        tensors = read_weights(self.path)
        parts = {part: tensors.get(f"{self.name}{_SEPARATOR}{part}") for part in _PARTS}
        return QuantizedTensor(scheme=self.scheme, **parts)  # type: ignore[arg-type]  # those that a scheme needs are there


def _stored_rows(path: Path, name: str, matrix: torch.Tensor, start: int) -> torch.Tensor:
    rows: torch.Tensor = read_weights(path)[name].flatten(1)[start : start + len(matrix)]
    return rows


def _codes(path: Path, stored: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Any]:
    made = {}
    for name, declared in stored["schemes"].items():
        scheme, rounded = Scheme(**declared), stored["inputs"].get(name)
        inputs = None if rounded is None else InputScheme(**rounded)
        read = StoredCodes(path, name, scheme)
        made[name] = WeightCodes(layers[name], scheme, read, inputs=inputs)
    return made


def _floats(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in read_weights(path).items() if _SEPARATOR not in n}


def for_the_block(
    path: Path, stored: Mapping[str, Any], carrier: BlockCheckpoint
) -> dict[str, WeightCodes | torch.Tensor]:
    """Return changes as an open block takes them: floats in memory, codes read when wanted."""
    layers = {layer.weight: layer for layer in carrier.layers()}
    return {**_floats(path), **_codes(path, stored, layers)}


def restored(path: Path, stored: Mapping[str, Any], carrier: BlockCheckpoint) -> Changes:
    """Return changes that are read from the store when they are wanted."""
    layers = {layer.weight: layer for layer in carrier.layers()}
    spans = {name: tuple(largest) for name, largest in stored["spans"].items()}
    changes = Changes(notes=tuple(stored["notes"]), spans=spans)
    for name, tensor in _floats(path).items():
        layer = layers.get(name)
        changes.weights[name] = (
            tensor if layer is None else WeightChange(layer, partial(_stored_rows, path, name))
        )
    changes.weights.update(_codes(path, stored, layers))
    for outcome in stored["outcomes"]:
        changes.outcomes[outcome["name"]] = LayerOutcome(**outcome)
    return changes
