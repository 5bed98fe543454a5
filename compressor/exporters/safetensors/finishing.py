"""What makes streamed shards a checkpoint: index, configuration, companions, and a check of all."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from compressor.errors import ArtifactError, ModelError
from compressor.exporters.safetensors.blocks import block_tensors, pieces
from compressor.exporters.safetensors.shard_file import WrittenFile, journal_of, noted
from compressor.exporters.safetensors.stream_plan import PlannedShard, StreamPlan
from compressor.files import disk_errors, file_sha256, publish, remove_stale_staging, staging
from compressor.models.codec.headers import read_header
from compressor.types.tensors import StoredTensor

_SAMPLED = 8  # quantized tensors that are computed again, and kept ones that are compared
_ROWS = 1 << 16  # elements of each block that is


def finish(plan: StreamPlan, directory: Path) -> tuple[WrittenFile, ...]:
    """Write what belongs to the shards, once all processes have written theirs.

    Args:
        plan: what was written.
        directory: where :func:`compressor.exporters.safetensors.streaming.write_shards` wrote it.

    Returns:
        All files, the main one first.

    Raises:
        ArtifactError: a shard is missing.
        InputError: the disk is full.
    """
    written = []
    for shard in plan.shards:
        found = noted(shard, directory, plan.digest)
        if found is None:
            raise ArtifactError(
                f"shard {shard.name!r}",
                "is missing or was written for another plan",
                "run the same command again",
            )
        written.append(found)
    remove_stale_staging(directory)
    with disk_errors(directory), staging(directory) as folder:
        drafts = []
        for name, text in plan.texts.items():
            (folder / name).write_bytes(text)
            drafts.append(folder / name)
        for source in plan.companions:
            (folder / source.name).write_bytes(source.read_bytes())
            drafts.append(folder / source.name)
        for draft in drafts:
            target = directory / draft.name
            publish(draft, target)
            written.append(WrittenFile(target, target.stat().st_size, file_sha256(target)))
        for shard in plan.shards:
            journal_of(directory / shard.name).unlink()
    return tuple(sorted(written, key=lambda file: file.path.name != plan.main))


def check_written(plan: StreamPlan, directory: Path) -> str:
    """Compare files with the plan that they were written by.

    All headers are compared, and blocks of rows of several tensors in each shard computed again
    from the input.

    Returns:
        What was compared, in a few words.

    Raises:
        ArtifactError: they differ.
    """
    blocks = tensors = 0
    for shard in plan.shards:
        path = directory / shard.name
        _check_header(shard, path)
        with path.open("rb") as stream:
            for tensor in _sample(shard):
                tensors += 1
                for start, stop in _sample_blocks(tensor):
                    blocks += 1
                    _check_block(shard, tensor, (start, stop), stream.fileno())
    for name, text in plan.texts.items():
        if not _same(directory / name, text):
            raise _differs(directory / name, "is not what was planned")
    for source in plan.companions:
        if not _same(directory / source.name, source.read_bytes()):
            raise _differs(directory / source.name, "is not the input's")
    return f"{len(plan.shards)} headers, {blocks} blocks of {tensors} tensors computed again"


def _check_header(shard: PlannedShard, path: Path) -> None:
    try:
        header = read_header(path)
    except ModelError as error:
        raise ArtifactError(error.subject, error.problem, "export it again") from error
    with path.open("rb") as stream:
        text = stream.read(len(shard.layout.header))
    if header.nbytes != shard.nbytes or text != shard.layout.header:
        raise _differs(path, "describes other tensors than were planned")


def _sample(shard: PlannedShard) -> list[StoredTensor]:
    """Return some tensors, those that are quantized and those that are kept."""
    chosen = []
    for quantized in (True, False):
        some = [t for t in shard.sources if (t.codes is not None) is quantized and t.elements]
        step = max(1, -(-len(some) // _SAMPLED))
        chosen += some[::step]
    return chosen


def _sample_blocks(tensor: StoredTensor) -> list[tuple[int, int]]:
    """Return the first block of rows, one in the middle, and the last."""
    blocks = pieces(tensor, _ROWS)
    return [blocks[i] for i in sorted({0, len(blocks) // 2, len(blocks) - 1})]


def _check_block(
    shard: PlannedShard, tensor: StoredTensor, rows: tuple[int, int], handle: int
) -> None:
    for name, expected, start in block_tensors(tensor, *rows, _ROWS):
        if not expected.numel():
            continue
        wanted = expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if os.pread(handle, len(wanted), shard.layout.offsets[name] + start) != wanted:
            raise ArtifactError(
                f"tensor {name!r}",
                f"in {shard.name!r} is not what its input gives",
                "the disk or the memory is faulty; export it again",
            )


def _same(path: Path, text: bytes) -> bool:
    return path.is_file() and path.read_bytes() == text


def _differs(path: Path, problem: str) -> ArtifactError:
    return ArtifactError(f"file {path.name!r}", problem, "export it again")
