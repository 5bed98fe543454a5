"""What an inspection found, as a JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from compressor.inspection.contents import Contents, EngineContents, RunContents


def contents_json(contents: Contents) -> dict[str, Any]:
    """Return the document."""
    if isinstance(contents, RunContents):
        return {"kind": "run output", "intact": contents.intact, **asdict(contents)}
    if isinstance(contents, EngineContents):
        return {"kind": "TensorRT engine", **asdict(contents)}
    return {
        **asdict(contents),
        "bytes": contents.bytes,
        "bytes_by_dtype": contents.bytes_by_dtype,
    }
