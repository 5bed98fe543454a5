"""Entropy coders on the streams of chunks, many at once, and checksums of what comes out.

Codes of trained weights hardly repeat, so what counts is how well their frequencies are coded.
Measured on 8-bit codes of Gaussian weights, Brotli takes 0.2 % more than their Shannon entropy and
decodes 330 MB/s on a core, Zstandard 0.8 % and 1 GB/s, LZMA 1.7 % and 22 MB/s, an asymmetric
numeral system (``constriction``) 0.01 % and 45 MB/s. So Zstandard codes large files, but for
streams in which Brotli finds more. Of small networks Brotli, which keeps several tables and chooses
by the bytes before, makes 1 to 4 % less than the entropy of single codes; there its speed does not
matter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import brotli
import numpy as np
import zstandard

from compressor.exporters.archive.contexts import MOST_BYTES, coded_bytes, read_bytes
from compressor.exporters.archive.forms import WHOLE, Form, Reader
from compressor.types.tensors import Array

CHUNK = 1024 * WHOLE
"""Bytes of a tensor that are coded together."""

SUM = 4  # bytes that are kept of a checksum; the SHA-256 of each whole file is kept too

_ZSTANDARD = 0  # the first byte of a frame that says neither length nor checksum: RFC 8878, 3.1.1.1
_BROTLI = 1  # what stands before a stream of the other coder, RFC 7932
_MIXED = 2  # and before a text whose bits are mixed
_WINDOW = 20  # its window, as a power of two: a whole chunk
_QUALITY, _BEST_QUALITY = 5, 11  # the latter looks at several tables; it codes 0.7 MB/s
_WORTH = 0.995  # of the bytes: what the slower decoder has to save in large files
_AS_EXPECTED, _FEW = 1.01, 64  # times the bytes, and bytes, up to which a stream is like another
_UNFRAMED: dict[str, Any] = {
    "format": zstandard.FORMAT_ZSTD1_MAGICLESS,
    "write_content_size": False,
    "write_checksum": False,
    "write_dict_id": False,
}


Coder: TypeAlias = Literal["frequencies", "repetitions", "contexts"]
_FAST: tuple[Coder, ...] = ("frequencies", "repetitions")


class Expected(NamedTuple):
    """What coded a stream best, and the share of its bytes that were left."""

    coder: Coder
    share: float


@dataclass(frozen=True)
class Coded:
    """A coded chunk: its streams one after the other, and the stored bytes of each.

    Attributes:
        best: what coded each stream.
    """

    lengths: tuple[int, ...]
    data: bytes
    best: tuple[Expected, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.data)

    @property
    def checksum(self) -> str:
        """The beginning of the SHA-256 of the data, in hexadecimal."""
        return checksum(self.data)


def checksum(data: bytes | memoryview) -> str:
    """Return the beginning of the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[: 2 * SUM]


def encode(
    data: Array, form: Form, level: int, *, small: bool = False, known: Sequence[Expected] = ()
) -> Coded:
    """Code a chunk.

    Args:
        data: uint8 ``[n]``.
        small: it is of a small file, of which every byte counts and speed does not.
        known: what was best for each stream of another chunk of the tensor: it is tried alone,
            and all are only where it leaves more than it did there.
    """
    if form.mixed:
        mixed = form.mixed_stream(data)
        return Coded((len(mixed),), mixed)
    parts, best = [], []
    for place, stream in enumerate(form.streams(data)):
        plain = stream.tobytes()
        expected = known[place] if place < len(known) else None
        coder, coded = _smallest(plain, level, small, expected)
        # A stream that is as long as it has to be is one that is stored as it was.
        kept = len(coded) < len(plain) or form.of_any_length(place)
        parts.append(coded if kept else plain)
        best.append(Expected(coder, len(parts[-1]) / max(len(plain), 1)))
    return Coded(tuple(len(part) for part in parts), b"".join(parts), tuple(best))


def decode(
    data: memoryview, lengths: Iterable[int], form: Form, nbytes: int, *, damaged: bool = False
) -> Array:
    """Invert :func:`encode`.

    Args:
        data: the stored streams, whose checksum has been compared.
        damaged: the checksum differed: of a stream that cannot be decoded to its end, take the
            beginning, and zeros for the rest.

    Raises:
        ValueError: the streams do not make such a chunk.
    """
    if form.mixed:
        if len(tuple(lengths)) != 1:
            raise ValueError("there are too many streams")
        return form.mixed_chunk(bytes(data), nbytes)
    reader, start = Reader(form, nbytes), 0
    for length in lengths:
        expected = reader.next_length
        if expected is None:
            raise ValueError("there are too many streams")
        part = data[start : start + length]
        start += length
        most = reader.most if expected < 0 else expected
        if length == expected:
            plain: bytes | memoryview = part
        elif damaged:
            plain = _beginning(part, most).ljust(expected, b"\0")
        else:
            plain = decompressed(part, most)
        if expected >= 0 and len(plain) != expected:
            raise ValueError(f"a stream has {len(plain)} bytes, not {expected}")
        reader.give(np.frombuffer(plain, np.uint8))
    if reader.next_length is not None or start != len(data):
        raise ValueError("streams are missing")
    whole = reader.whole()
    if whole.size != nbytes:
        raise ValueError(f"it has {whole.size} bytes, not {nbytes}")
    return whole


def compressed(plain: bytes, level: int, *, small: bool = False) -> bytes:
    """Code bytes with the coder that makes least of them, without lengths or checksums."""
    return _smallest(plain, level, small, None)[1]


def coded_text(plain: bytes, level: int, *, mixed: bool) -> bytes:
    """Code a text with the coder that makes least of it; its length has to be kept.

    Args:
        plain: the text.
        level: Zstandard's.
        mixed: its bits may be mixed, if it is short.
    """
    coded = compressed(plain, level, small=True)
    if not mixed or len(plain) > MOST_BYTES:
        return coded
    return min(bytes([_MIXED]) + coded_bytes(plain, 1), coded, key=len)


def decoded_text(data: bytes, nbytes: int) -> bytes:
    """Invert :func:`coded_text`.

    Args:
        data: what it wrote.
        nbytes: of the text.

    Raises:
        ValueError: it is something else, or longer.
    """
    if data[:1] != bytes([_MIXED]):
        return decompressed(data, nbytes)
    if nbytes > MOST_BYTES:
        raise ValueError(f"a mixed text has {nbytes} bytes")
    return read_bytes(data[1:], nbytes, 1)


def quickly(data: Array, form: Form) -> int:
    """Return about the bytes that a chunk takes in a form, by the fastest coder."""
    return sum(
        min(len(_coded("frequencies", stream.tobytes(), 1, _QUALITY)), stream.size)
        for stream in form.streams(data)
    )


def _smallest(
    plain: bytes, level: int, small: bool, expected: Expected | None
) -> tuple[Coder, bytes]:
    """Return the coder that makes least of bytes, and what it makes."""
    quality = _BEST_QUALITY if small else _QUALITY
    if expected is not None:
        coded = _coded(expected.coder, plain, level, quality)
        if len(coded) <= _AS_EXPECTED * expected.share * len(plain) + _FEW:
            return expected.coder, coded
    fast = {coder: _coded(coder, plain, level, quality) for coder in _FAST}
    best = min(_FAST, key=lambda coder: len(fast[coder]))
    slow = _coded("contexts", plain, level, quality)
    if len(slow) < (1 if small else _WORTH) * len(fast[best]):
        return "contexts", slow
    return best, fast[best]


def _coded(coder: Coder, plain: bytes, level: int, quality: int) -> bytes:
    if coder == "contexts":
        return bytes([_BROTLI]) + bytes(brotli.compress(plain, quality=quality, lgwin=_WINDOW))
    if coder == "frequencies":
        return bytes(_entropy_coder().compress(plain))
    parameters = zstandard.ZstdCompressionParameters.from_level(level, **_UNFRAMED)
    return bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(plain))


def _entropy_coder() -> zstandard.ZstdCompressor:
    """Return a coder that hardly looks for repetitions.

    Among few symbols any level finds short repetitions by chance, which cost more than they save:
    4 % with 5-bit codes, and 10 % with codes half of which are one symbol.
    """
    parameters = zstandard.ZstdCompressionParameters(
        **_UNFRAMED,
        strategy=zstandard.STRATEGY_FAST,
        window_log=17,
        min_match=7,
        hash_log=6,
        chain_log=6,
        search_log=1,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def decompressed(data: bytes | memoryview, most: int) -> bytes:
    """Invert :func:`compressed`.

    Args:
        data: what it wrote.
        most: bytes that may come of it; no more memory is taken.

    Raises:
        ValueError: it is something else, or more would come of it.
    """
    first = data[0] if data else -1
    if first == _BROTLI:
        return _by_brotli(data[1:], most)
    if first != _ZSTANDARD:
        raise ValueError("it begins as no stream does")
    try:
        return _unframed().decompress(data, max_output_size=max(most, 1))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _by_brotli(data: bytes | memoryview, most: int) -> bytes:
    decoder = brotli.Decompressor()
    try:
        plain: bytes = decoder.process(data, output_buffer_limit=most + 1)
    except brotli.error as error:
        raise ValueError(str(error)) from error
    if len(plain) > most or not decoder.is_finished():
        raise ValueError("it ends where no stream does")
    return plain


def _beginning(data: memoryview, most: int) -> bytes:
    """Return what can be decoded of a damaged stream."""
    if data[:1] == bytes([_BROTLI]):
        data, take = data[1:], brotli.Decompressor().process
    else:
        take = _unframed().decompressobj().decompress
    beginning = b""
    with suppress(brotli.error, zstandard.ZstdError):  # what comes before the damage is returned
        for place in range(len(data)):
            beginning += take(bytes(data[place : place + 1]))
    return beginning[:most]


def _unframed() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)


def threads() -> int:
    """Return how many chunks are worked on at once: one for each core of this process."""
    return len(os.sched_getaffinity(0))
