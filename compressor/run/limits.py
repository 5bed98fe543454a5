"""Judge what was measured against the spec's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.spec.keys import LimitKeys


def judge(limits: LimitKeys, artifacts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each limit and artifact: limit, measured, and whether it holds.

    A latency limit fails only where the whole 95 % interval of the measured ratio lies above it,
    so that noise alone does not fail a run. It applies to what is deployed, not to storage
    formats. A limit on what was not measured, for which the artifact gives the reason, has no
    entry: it neither holds nor fails.
    """
    entries: list[dict[str, Any]] = []
    for artifact in artifacts:
        path = artifact["path"]
        drop = artifact["metric_drop"]
        if limits.metric_drop is not None and drop is not None:
            entries.append(
                _entry("metric-drop", path, limits.metric_drop, drop, drop <= limits.metric_drop)
            )
        if limits.size_ratio is not None:
            size = artifact["size_ratio"]
            entries.append(
                _entry("size-ratio", path, limits.size_ratio, size, size <= limits.size_ratio)
            )
        if limits.latency_ratio is not None and artifact["deployed"]:
            ratio = artifact["latency"][0]["ratio"]
            entry = _entry(
                "latency-ratio",
                path,
                limits.latency_ratio,
                ratio["value"],
                ratio["ci95"][0] <= limits.latency_ratio,
            )
            entries.append({**entry, "ci95": ratio["ci95"]})
    return entries


def _entry(name: str, path: str, limit: float, measured: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "artifact": path, "limit": limit, "measured": measured, "ok": ok}
