"""How many tokens in a row a language model is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PIECE = 512


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens in a row a language model was made for.

    Args:
        config: the content of its ``config.json``.

    Returns:
        ``None`` where nothing says so, or where positions adapt to any length: ALiBi (Press et
        al. 2022, arXiv:2108.12409) and rotary embeddings that are scaled by the length.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    scaled = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if config.get("alibi") or scaled == "dynamic":
        return None
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    return longest if isinstance(longest, int) and longest > 0 else None


def piece_length(config: Mapping[str, Any]) -> int:
    """Return how many tokens of a text a language model is given at once where nobody says so."""
    return min(positions_of(config) or _PIECE, _PIECE)
