"""Weights with many equal magnitudes, for tests of prune-magnitude."""

from __future__ import annotations

import torch

from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext

COLUMNS, WIDE, ROWS = 64, 96, 48
ANY = PassContext()


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of unlike sizes, on a coarse grid, so that many magnitudes are shared."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up.weight": (WIDE, COLUMNS), "down.weight": (ROWS, WIDE)}
    found = {n: torch.randn(s, generator=generator).mul(16).round() / 16 for n, s in shapes.items()}
    found["up.weight"] = found["up.weight"] / 2
    found["up.bias"] = torch.randn(WIDE, generator=generator)
    return found


def pruned(carrier: Carrier, declared: PruneMagnitude) -> dict[str, torch.Tensor]:
    """Prune a model, and return its layers' weights in canonical form, by layer name."""
    return matrices(declared.apply(carrier, ANY, {}).carrier)


def matrices(carrier: Carrier) -> dict[str, torch.Tensor]:
    """Return the layers' weights in canonical form, by layer name."""
    return {x.name: x.canonical(carrier.weight(x)) for x in carrier.layers()}
