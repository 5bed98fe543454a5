"""Stacked experts of a checkpoint, under the names that single experts have in other files.

``transformers`` stacks the experts of a block when it loads a model, ``gate_up_proj [experts, 2 *
inner, hidden]`` and ``down_proj [experts, hidden, inner]``, and takes them apart when it saves it,
unless it is told not to (``save_original_format=False``). Each expert's rows follow each other in
a stack, so such a file holds the matrices of single experts, too, at other places of the same
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from compressor.models.checkpoint.folder import Checkpoint
from compressor.models.codec.headers import TensorHeader

_STACK = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.+)\.mlp\.(gate\.weight)")
_AXES = 3


@dataclass(frozen=True)
class _Names:
    """What files of a model call the layers of experts.

    Attributes:
        module: that holds router and experts.
        leaves: of an expert, whose rows follow each other in a stack.
    """

    module: str
    leaves: Mapping[str, tuple[str, ...]]


_GATED = _Names("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
_MODELS: Mapping[str, _Names] = {
    "mixtral": _Names("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen2_moe": _GATED,
    "qwen3_moe": _GATED,
}


def with_single_experts(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint that names each expert's layers where files have stacks of them.

    That of other models, and one without stacks, is returned as it is.
    """
    names = _MODELS.get(str(source.config.get("model_type")))
    if names is None or not any(map(_is_stack, source.tensors.values())):
        return source
    shards = []
    for shard in source.shards:
        made = [each for header in shard.tensors.values() for each in _named(header, names)]
        shards.append(replace(shard, tensors={header.name: header for header in made}))
    return replace(source, shards=tuple(shards))


def _is_stack(header: TensorHeader) -> bool:
    return len(header.shape) == _AXES and _STACK.fullmatch(header.name) is not None


def _named(header: TensorHeader, names: _Names) -> Iterator[TensorHeader]:
    found = _STACK.fullmatch(header.name)
    leaves = names.leaves[found[2]] if found is not None else ()
    if found is None or not _is_stack(header) or header.shape[1] % len(leaves):
        router = _ROUTER.fullmatch(header.name)
        name = f"{router[1]}.{names.module}.{router[2]}" if router is not None else header.name
        yield header._replace(name=name)
        return
    experts, rows, columns = header.shape
    size = header.nbytes // (experts * len(leaves)) if experts else 0
    for place in range(experts * len(leaves)):
        expert, leaf = divmod(place, len(leaves))
        yield TensorHeader(
            f"{found[1]}.{names.module}.experts.{expert}.{leaves[leaf]}.weight",
            header.dtype,
            (rows // len(leaves), columns),
            header.offset + place * size,
            size,
        )
