"""What must be true of bytes: hashes of files, checksums of tensors, and documents with a seal.

A file's SHA-256 proves every byte of it. The checksums of the tensors in it cost little, so they
are compared when a model is used, and tell which tensor of a damaged file is another one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compressor.files import json_text

try:  # the same values by the processor's vector instructions, up to ten times as fast
    from isal.isal_zlib import crc32
except ImportError:  # which has no package for every machine
    from zlib import crc32

SEAL = "seal"
"""The key in a document under which its own hash is."""

NO_HASH = "0" * 64
"""What stands in place of a hash while that is computed."""

NO_CHECKSUM = "0" * 8

_SEALED = re.compile(rb'"seal": "([0-9a-f]{64})"')


@dataclass(frozen=True)
class ExpectedFile:
    """A file as it was written.

    Attributes:
        name: its path in the folder, with ``/``.
        sha256: the hash of its bytes, in hexadecimal.
        tensors: the checksums of the tensors in it; empty where they are not known.
    """

    name: str
    sha256: str
    tensors: Mapping[str, str] = field(default_factory=dict)


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Return the CRC-32 of a tensor's bytes, eight hexadecimal digits.

    >>> checksum([b"123", b"456789"])
    'cbf43926'

    Args:
        parts: what is stored of it, in order.
    """
    value = 0
    for part in parts:
        value = crc32(part, value)
    return f"{value:08x}"


def sealed_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON, with a seal as its last entry: no byte changes unnoticed."""
    text = json_text({**document, SEAL: NO_HASH})
    before, _, after = text.rpartition(NO_HASH)
    return f"{before}{hashlib.sha256(text.encode()).hexdigest()}{after}"


def is_sealed(text: bytes) -> bool:
    """Return whether a document has a seal and is as it was sealed."""
    seals = list(_SEALED.finditer(text))
    if not seals:
        return False
    start, end = seals[-1].span(1)
    whole = hashlib.sha256(text[:start] + NO_HASH.encode() + text[end:]).hexdigest()
    return whole.encode() == text[start:end]
