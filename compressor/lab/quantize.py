"""The spec behind ``compress quantize``: a bare checkpoint, one pass, one export."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import SpecError
from compressor.spec.load import Spec, check_spec
from compressor.spec.source_text import Document

_COMMAND = "compress quantize"


@dataclass(frozen=True)
class QuantizeOptions:
    """What ``compress quantize`` may be told.

    Attributes:
        preset: a preset of the pass ``quantize-weights``.
        method: one that needs weights alone.
        range: how scales are found.
        skip: patterns of layers that are left as they are.
        embeddings: quantize tables and the output layer too.
        max_shard_size: bytes of a written file at most; ``None`` keeps the input's shards.
    """

    preset: str
    method: str = "rtn"
    range: str | None = None
    skip: Sequence[str] = ()
    embeddings: bool = False
    max_shard_size: int | None = None


def quantization_spec(checkpoint: Path, output: Path, options: QuantizeOptions) -> Spec:
    """Return the spec that quantizes a checkpoint's weights, for others to load.

    Args:
        checkpoint: a safetensors file or a directory of them.
        output: the new directory.
        options: what is done.

    Raises:
        SpecError: an option is wrong, or the output is the checkpoint itself.
    """
    source, target = checkpoint.resolve(), output.resolve()
    if target == (source if source.is_dir() else source.parent):
        raise SpecError(
            f"output {str(output)!r}", "is where the checkpoint lies", "name another folder"
        )
    step: dict[str, Any] = {
        "pass": "quantize-weights",
        "preset": options.preset,
        "method": options.method,
        "embeddings": options.embeddings,
        "layers": [{"match": pattern, "skip": True} for pattern in options.skip],
    }
    export: dict[str, Any] = {"format": "safetensors", "layout": "compressed-tensors"}
    if options.range is not None:
        step["range"] = options.range
    if options.max_shard_size is not None:
        export["max-shard-size"] = options.max_shard_size
    value = {
        "version": 1,
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", target.name).strip("-._") or "quantized",
        # A dollar in a path of the command line is a dollar.
        "model": {"checkpoint": str(checkpoint).replace("$", "$$")},
        "passes": [step],
        "exports": [export],
        "output": str(output).replace("$", "$$"),
    }
    return check_spec(Document(Path(_COMMAND), value))
