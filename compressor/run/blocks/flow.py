"""What flows between the blocks of a checkpoint, in files: a folder for each block."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from compressor.files import disk_errors
from compressor.models.transformers.decoder import Decoder
from compressor.types.data import Ranks
from compressor.types.tensors import Array


class Flow:
    """What enters each block, batch by batch, of this process's batches.

    A block's folder appears whole or not at all, so that a run that was killed can go on from it.

    Args:
        folder: where the folders are made; it may hold others, of flows of other names.
        name: what the folders' names begin with.
        ranks: the processes that share batches.
    """

    def __init__(self, folder: Path, name: str, ranks: Ranks):
        self._folder = folder
        self._name = name
        self._end = f"of-process-{ranks.rank}-{ranks.size}"

    def has(self, index: int) -> bool:
        """Return whether what enters a block is there."""
        return self._place(index).is_dir()

    def read(self, index: int, number: int) -> Array:
        """Return what enters a block for a batch."""
        found: Array = np.load(self._place(index) / f"{number}.npy")
        return found

    def entering(
        self, decoder: Decoder, tokens: torch.Tensor, index: int, number: int
    ) -> torch.Tensor:
        """Return what enters a block for a batch of tokens; the first block has no file."""
        if index == 0:
            return decoder.arguments(tokens)[0].hidden.clone()
        return torch.from_numpy(self.read(index, number))

    def write(self, index: int, values: Iterable[Array]) -> None:
        """Keep what enters a block, batch by batch.

        Raises:
            InputError: the disk is full.
        """
        target = self._place(index)
        draft = target.with_name(f"{target.name}.part")
        shutil.rmtree(draft, ignore_errors=True)
        with disk_errors(self._folder):
            draft.mkdir()
        for number, value in enumerate(values):
            with disk_errors(self._folder):
                np.save(draft / f"{number}.npy", value)
        shutil.rmtree(target, ignore_errors=True)  # of a run that began again
        draft.replace(target)

    def forget(self, index: int) -> None:
        """Remove what enters a block."""
        shutil.rmtree(self._place(index), ignore_errors=True)

    def _place(self, index: int) -> Path:
        return self._folder / f"{self._name}-{index}-{self._end}"
