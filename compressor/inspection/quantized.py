"""What a Hugging Face folder says of its quantization, and which tensors take part in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How the weights of quantized Hugging Face checkpoints and their helpers are called.
PACKED = ("weight_packed", "qweight")
SHAPE = "weight_shape"
_SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "scales")
_ZERO_POINTS = ("weight_zero_point", "qzeros")
_OTHERS = (
    SHAPE,
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "g_idx",
)


@dataclass(frozen=True)
class Group:
    """Layers that are quantized alike.

    Attributes:
        targets: modules' names, regular expressions after ``re:``, or classes.
        bits: of a weight; ``None`` where it is not said.
        words: the scheme, such as ``int4/group 128``.
    """

    targets: tuple[str, ...]
    bits: int | None
    words: str

    def holds(self, module: str) -> bool:
        """Tell whether a module belongs to it by name; classes are not known here."""
        for target in self.targets:
            if target.startswith("re:"):
                try:
                    if re.match(target[3:], module):
                        return True
                except re.error:  # it was never a pattern, whoever wrote it
                    continue
            elif target == module:
                return True
        return False


@dataclass(frozen=True)
class Quantization:
    """The ``quantization_config`` of a folder.

    Attributes:
        words: all of it, in short; empty without one.
        groups: how layers are quantized; the first stands for those that no other one names.
    """

    words: str = ""
    groups: tuple[Group, ...] = ()

    def group_of(self, module: str) -> Group | None:
        """Return how a module that is quantized is quantized."""
        named = (group for group in self.groups if group.holds(module))
        return next(named, self.groups[0] if self.groups else None)


def role_of(name: str) -> str:
    """Return what a tensor is by its name: ``scale``, ``zero point``, ``helper`` or nothing."""
    last = name.rpartition(".")[2]
    if last in _SCALES:
        return "scale"
    if last in _ZERO_POINTS:
        return "zero point"
    return "helper" if last in _OTHERS else ""


def read_quantization(folder: Path) -> Quantization:
    """Read ``quantization_config`` of a folder; one that cannot be read says nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return Quantization()
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        return Quantization()
    groups = found.get("config_groups")
    if isinstance(groups, dict):
        read = tuple(_group(group) for group in groups.values() if isinstance(group, dict))
    else:
        read = (_group({"weights": found}),)
    parts = [str(found.get(key)) for key in ("quant_method", "format") if found.get(key)]
    if len({(group.bits, group.words) for group in read}) > 1:
        parts.append(" and ".join(dict.fromkeys(group.words for group in read)))
    elif read:
        weights = _first_weights(found)
        bits, size = read[0].bits, _group_size(weights)
        parts += [f"{bits} bits"] if bits else []
        parts += [f"group {size}"] if size else []
    return Quantization(", ".join(parts), read)


def _first_weights(config: dict[str, Any]) -> dict[str, Any]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return config
    first = next((group for group in groups.values() if isinstance(group, dict)), {})
    weights = first.get("weights")
    return weights if isinstance(weights, dict) else {}


def _group(group: dict[str, Any]) -> Group:
    weights = group.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    targets = group.get("targets")
    names = tuple(str(t) for t in targets) if isinstance(targets, list) else ()
    bits = weights.get("num_bits", weights.get("bits", weights.get("w_bit")))
    bits = bits if isinstance(bits, int) else None
    size = _group_size(weights)
    kind = "float" if weights.get("type") == "float" else "int"
    span = f"group {size}" if size else str(weights.get("strategy") or "channel")
    asymmetric = " asym" if weights.get("symmetric") is False else ""
    return Group(names, bits, f"{kind}{bits}/{span}{asymmetric}" if bits else "")


def _group_size(weights: dict[str, Any]) -> int | None:
    size = weights.get("group_size", weights.get("q_group_size"))
    return size if isinstance(size, int) and size > 0 else None
