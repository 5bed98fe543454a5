"""A cache of the statistics that several passes request of the same model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from compressor.types.statistics import Moments, Request

_LIMIT = 256 << 20


class StatisticsCache:
    """Keeps statistics by model and request.

    Args:
        limit: bytes of arrays that are kept; what would exceed them is gathered anew.
    """

    def __init__(self, limit: float = _LIMIT):
        self._left = limit
        self._kept: dict[Hashable, dict[str, tuple[Request, Any]]] = {}

    def of(
        self,
        model: Hashable,
        requests: Sequence[Request],
        collect: Callable[[Sequence[Request]], Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return statistics by ``Request.key``.

        Args:
            model: equal for models that compute the same, in which values have the same names.
            collect: gathers those that are missing.
        """
        kept = self._kept.setdefault(model, {})
        known = {r.key: kept[r.key][1] for r in requests if kept.get(r.key, (None,))[0] == r}
        missing = [request for request in requests if request.key not in known]
        found = collect(missing) if missing else {}
        for request in missing:
            size = _bytes(found[request.key])
            if size <= self._left:
                self._left -= size
                kept[request.key] = request, found[request.key]
        return {r.key: known[r.key] if r.key in known else found[r.key] for r in requests}


def _bytes(statistic: Any) -> int:
    """Return the bytes of a statistic's arrays, those included that are computed when read."""
    if isinstance(statistic, torch.Tensor | np.ndarray):
        return statistic.nbytes
    if isinstance(statistic, Moments):
        return statistic.first.nbytes * (statistic.first.shape[-1] + 1)
    if is_dataclass(statistic):
        return sum(_bytes(getattr(statistic, field.name)) for field in fields(statistic))
    return sum(map(_bytes, statistic)) if isinstance(statistic, tuple) else 0
