"""Windows over one stream of tokens, as causal language models are trained and judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from compressor.calibration.sources.tokenizer import Tokens
from compressor.errors import DataError
from compressor.types.tensors import Array, Batch

_IDS, _LABELS, _MASK = "input_ids", "labels", "attention_mask"
WINDOW_ARRAYS = (_IDS, _LABELS, _MASK)


@dataclass(frozen=True)
class Windows:
    """How a stream is cut.

    Attributes:
        subject: how errors name the stream.
        length: tokens in a sample; a window holds one more, which is only a label.
        stride: tokens from one window's start to the next.
    """

    subject: str
    length: int
    stride: int

    def cut(self, stream: Iterable[Tokens]) -> Iterator[Array]:
        """Yield int64 ``[length + 1]``, at least one.

        Raises:
            DataError: the stream is shorter than one window.
        """
        span = self.length + 1
        kept = np.empty(0, np.int64)
        skip = seen = 0
        cut = False
        for tokens in stream:
            seen += len(tokens)
            kept = np.concatenate([kept, tokens])
            kept, skip = kept[skip:], max(0, skip - len(kept))
            while len(kept) >= span:
                yield kept[:span]
                cut = True
                skip = max(0, self.stride - len(kept))
                kept = kept[self.stride :]
        if not cut:
            raise DataError(
                self.subject,
                f"has {seen} tokens, but a sample needs {span}: {self.length} and the next one",
                f"take a length of {seen - 1} at most" if seen > 1 else "give a longer text",
            )


def window_batches(
    windows: Iterable[Array], names: Mapping[str, str], size: int
) -> Iterator[Batch]:
    """Yield batches of ``size`` windows.

    Args:
        names: the arrays to make, names in the model to names in the source.
    """
    rows: list[Array] = []
    for window in windows:
        rows.append(window)
        if len(rows) == size:
            yield _batch(rows, names)
            rows = []
    if rows:
        yield _batch(rows, names)


def _batch(rows: list[Array], names: Mapping[str, str]) -> Batch:
    windows = np.stack(rows)
    arrays = {
        _IDS: windows[:, :-1],
        _LABELS: windows[:, 1:],
        _MASK: np.ones((len(windows), windows.shape[1] - 1), np.int64),
    }
    return {name: np.array(arrays[stored], order="C") for name, stored in names.items()}
