"""Run a checkpoint over evaluation data from its files, all data through one block at a time.

To judge a model sample by sample would be to read all of its weights for each of them. So what
flows out of the last block is found for all batches first, and lies in files; then each batch takes
the output layer alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from weakref import finalize

import numpy as np
import torch

from compressor.files import STAGING, disk_errors
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, opened_block
from compressor.types.tensors import Array, Batch

_TOKENS, _LOGITS = "input_ids", "logits"


class DecoderRunner:
    """A checkpoint as its passes have left it, for batches that are known beforehand.

    Args:
        batches: all that will be run.
        folder: on a disk with room for what flows between two blocks.
    """

    def __init__(self, carrier: BlockCheckpoint, batches: Iterable[Batch], folder: Path):
        self._carrier = carrier
        self._places: dict[bytes, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
        finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        tokens: list[torch.Tensor] = []
        for batch in batches:
            self._places[_digest(batch)] = len(tokens)
            tokens.append(torch.from_numpy(np.ascontiguousarray(batch[_TOKENS])))
        for index in range(len(carrier.decoder.blocks)):
            self._run_all(index, tokens)

    @property
    def runtime(self) -> str:
        """What executes it."""
        return f"PyTorch {torch.__version__} (CPU), block by block"

    def run(self, batch: Batch) -> Batch:
        """Return the logits of one of the batches, float32 ``[batch, sequence, vocabulary]``."""
        hidden = self._hidden(self._places[_digest(batch)])
        tokens = torch.from_numpy(np.ascontiguousarray(batch[_TOKENS]))
        return {_LOGITS: self._carrier.decoder.logits(tokens, hidden).numpy()}

    def _run_all(self, index: int, tokens: list[torch.Tensor]) -> None:
        decoder = self._carrier.decoder
        self._carrier.check_files()
        module = opened_block(self._carrier, index, self._folder)
        for place, batch in enumerate(tokens):
            given = decoder.arguments(batch)[index]
            hidden = given.hidden if index == 0 else self._hidden(place)
            flowing = decoder.run(module, hidden, given).numpy()
            with disk_errors(self._folder):
                np.save(self._file(place), flowing)

    def _hidden(self, place: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self._file(place)))

    def _file(self, place: int) -> Path:
        return self._folder / f"{place}.npy"


def _digest(batch: Batch) -> bytes:
    tokens: Array = np.ascontiguousarray(batch[_TOKENS])
    return blake2b(f"{tokens.shape}".encode() + tokens.tobytes()).digest()
