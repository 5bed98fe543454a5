"""Entropy coders on the streams of chunks, many at once, and checksums of what comes out.

Zstandard's entropy coder alone does the work: codes of trained weights do not repeat. Measured on
8-bit codes of Gaussian weights it takes 0.8 % more than their Shannon entropy and decodes 1 GB/s on
a core; an asymmetric numeral system (``constriction``) takes 0.01 % more and decodes 45 MB/s,
Brotli 0.3 % and 340 MB/s, LZMA 1.7 % and 22 MB/s. Of small networks LZMA's range coder, which needs
no tables and sees the symbol before, makes up to 3 % less; there its speed does not matter.
"""

from __future__ import annotations

import hashlib
import lzma
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import zstandard

from compressor.types.tensors import Array
from exporters.archive.forms import WHOLE, Form

CHUNK = 1024 * WHOLE
"""Bytes of a tensor that are coded together."""

SUM = 4  # bytes that are kept of a checksum; the SHA-256 of each whole file is kept too

_ZSTANDARD = 0  # the first byte of a frame that says neither length nor checksum: RFC 8878, 3.1.1.1
# The first byte of LZMA's range coder is always 0. In its place stands which symbols before count.
_RANGE_CODERS = {
    tag: [{"id": lzma.FILTER_LZMA1, "preset": 6, "dict_size": 1 << 20, "lc": lc, "lp": 0, "pb": 0}]
    for tag, lc in ((1, 0), (2, 3))
}
_WAITING = 2  # chunks beyond those in work
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Coded:
    """A coded chunk.

    Attributes:
        lengths: bytes of each of its streams, as they are stored.
        data: the streams, one after the other.
    """

    lengths: tuple[int, ...]
    data: bytes

    @property
    def checksum(self) -> str:
        """The beginning of the SHA-256 of the data, in hexadecimal."""
        return checksum(self.data)


def checksum(data: bytes | memoryview) -> str:
    """Return the beginning of the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[: 2 * SUM]


def encode(data: Array, form: Form, level: int, *, small: bool = False) -> Coded:
    """Code a chunk.

    Args:
        data: uint8 ``[n]``.
        form: how it is taken apart.
        level: Zstandard's.
        small: it is of a small file, of which every byte counts and speed does not.
    """
    parts = []
    for place, stream in enumerate(form.streams(data)):
        plain = stream.tobytes()
        coded = compressed(plain, level, small=small)
        # A stream that is as long as it has to be is one that is stored as it was.
        kept = len(coded) < len(plain) or form.of_any_length(place)
        parts.append(coded if kept else plain)
    return Coded(tuple(len(part) for part in parts), b"".join(parts))


def decode(data: memoryview, lengths: Iterable[int], form: Form, nbytes: int) -> Array:
    """Invert :func:`encode`.

    Args:
        data: the stored streams, whose checksum has been compared.
        lengths: bytes of each.
        form: how the chunk was taken apart.
        nbytes: of the chunk.

    Raises:
        ValueError: the streams do not make such a chunk.
    """
    reader, start = form.reader(nbytes), 0
    for length in lengths:
        wanted = reader.wanted
        if wanted is None:
            raise ValueError("there are too many streams")
        part = data[start : start + length]
        start += length
        most = reader.most if wanted < 0 else wanted
        plain = part if length == wanted else decompressed(part, most)
        if wanted >= 0 and len(plain) != wanted:
            raise ValueError(f"a stream has {len(plain)} bytes, not {wanted}")
        reader.give(np.frombuffer(plain, np.uint8))
    if reader.wanted is not None or start != len(data):
        raise ValueError("streams are missing")
    whole = reader.whole()
    if whole.size != nbytes:
        raise ValueError(f"it has {whole.size} bytes, not {nbytes}")
    return whole


def compressed(plain: bytes, level: int, *, small: bool = False) -> bytes:
    """Code bytes in the way that makes least of them.

    Nothing is written but the data: lengths and checksums are kept elsewhere.
    """
    found = [_entropy_coder().compress(plain), _zstandard(level).compress(plain)]
    if small:
        for tag, filters in _RANGE_CODERS.items():
            coded = lzma.compress(plain, format=lzma.FORMAT_RAW, filters=filters)
            if coded[:1] == b"\0":
                found.append(bytes([tag]) + coded[1:])
    return min(found, key=len)


def _zstandard(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(
            level,
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            write_content_size=False,
            write_checksum=False,
            write_dict_id=False,
        )
    )


def _entropy_coder() -> zstandard.ZstdCompressor:
    """Return a coder that hardly looks for repetitions.

    Among few symbols any level finds short ones by chance, which cost more than they save: of
    5-bit codes 4 % more, and of codes half of which are one symbol 10 %.
    """
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            write_content_size=False,
            write_checksum=False,
            write_dict_id=False,
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            min_match=7,
            hash_log=6,
            chain_log=6,
            search_log=1,
        )
    )


def decompressed(data: bytes | memoryview, most: int) -> bytes:
    """Invert :func:`compressed`.

    Args:
        data: what it wrote.
        most: bytes that may come of it; no more memory is taken.

    Raises:
        ValueError: it is something else, or more would come of it.
    """
    first = data[0] if data else -1
    if first in _RANGE_CODERS:
        return _by_range_coder(bytes(data[1:]), first, most)
    if first != _ZSTANDARD:
        raise ValueError("it begins as no stream does")
    decoder = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    try:
        return decoder.decompress(data, max_output_size=max(most, 1))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _by_range_coder(rest: bytes, tag: int, most: int) -> bytes:
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_RANGE_CODERS[tag])
    try:
        found = decoder.decompress(b"\0" + rest, max_length=most + 1)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error
    if len(found) > most or not decoder.eof or decoder.unused_data:
        raise ValueError("it ends where no stream does")
    return found


def threads() -> int:
    """Return how many chunks are worked on at once: one for each core that is ours."""
    return len(os.sched_getaffinity(0))


def in_order(
    workers: ThreadPoolExecutor, work: Callable[[ItemT], ResultT], items: Iterable[ItemT]
) -> Iterator[ResultT]:
    """Work on items at once, and yield the results in their order; few are held at a time."""
    coming: deque[Future[ResultT]] = deque()
    try:
        for item in items:
            coming.append(workers.submit(work, item))
            if len(coming) >= threads() + _WAITING:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()
