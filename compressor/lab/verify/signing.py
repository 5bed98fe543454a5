"""Sign the hashes of files, and check such a signature, with Ed25519.

The hashes are in a file that ``sha256sum -c`` reads; the signature of its bytes is in another one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from compressor.errors import InputError, ModelError, SpecError
from compressor.files import file_sha256, switch
from compressor.lab.verify.files import checked_name
from compressor.types.proofs import ExpectedFile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
_LONGEST = 100_000_000  # bytes of a list of hashes
_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"
_PUBLIC = "make it with: openssl pkey -in key.pem -pubout -out public.pem"


def signature_names(path: Path) -> tuple[str, str]:
    """Return the names of the list of hashes and of its signature, beside what was signed."""
    sums = SUMS if path.is_dir() else f"{path.name}.{SUMS}"
    return sums, f"{sums}.sig"


def with_signatures(names: Iterable[str]) -> set[str]:
    """Return files of a folder with the signatures that may lie beside them.

    They are those of the folder, of each file alone, and of each folder in it.

    Args:
        names: paths in the folder.
    """
    listed = set(names)
    folders = {str(folder / SUMS) for name in listed for folder in PurePosixPath(name).parents}
    sums = {SUMS, *folders, *(f"{name}.{SUMS}" for name in listed)}
    return listed | sums | {f"{name}.sig" for name in sums}


def write_signature(path: Path, names: Iterable[str], key: Path) -> str:
    """Write the hashes of files, and sign them.

    Args:
        path: what is signed: a folder, or an artifact in one.
        names: its files, by their paths in the folder.
        key: a private key, in PEM.

    Returns:
        The fingerprint of the public key.

    Raises:
        SpecError: there is no such key, or it is of another kind; or a file is no ordinary one.
    """
    private: Ed25519PrivateKey = _key(key, "--sign", "private", _MAKE)
    folder = path if path.is_dir() else path.parent
    sums, signature = signature_names(path)
    subject = f"path {str(path)!r}"
    lines = []
    for name in sorted(set(names) - {sums, signature}):
        if not (folder / checked_name(name, subject)).is_file():
            raise SpecError(subject, f"holds {name!r}, which is not a regular file", "remove it")
        lines.append(f"{file_sha256(folder / name)}  {name}\n")
    text = "".join(lines).encode()
    with switch(folder) as (staged, _):
        (staged / sums).write_bytes(text)
        (staged / signature).write_bytes(private.sign(text))
    return _fingerprint(private.public_key())


def check_signature(path: Path, key: Path) -> tuple[tuple[ExpectedFile, ...], str]:
    """Check who signed the hashes of files, and return these.

    Args:
        path: what was signed.
        key: a public key, in PEM.

    Returns:
        What must be true of the files, and the fingerprint of the key.

    Raises:
        SpecError: there is no such key, or it is of another kind.
        InputError: nothing is signed.
        ModelError: another key signed it, or the list was changed.
    """
    public: Ed25519PublicKey = _key(key, "--key", "public", _PUBLIC)
    from cryptography.exceptions import InvalidSignature

    folder = path if path.is_dir() else path.parent
    sums, signature = (folder / name for name in signature_names(path))
    for file in (sums, signature):
        if not file.is_file():
            raise InputError(
                f"path {str(path)!r}", f"is not signed: there is no {file.name}", "ask its author"
            )
        if file.stat().st_size > _LONGEST:
            raise ModelError(f"file {str(file)!r}", "is too large for what it is", "ask its author")
    text = sums.read_bytes()
    try:
        public.verify(signature.read_bytes(), text)
    except InvalidSignature as error:
        raise ModelError(
            f"signature {str(signature)!r}",
            f"was not made with the key of {str(key)!r}, or {sums.name} was changed since",
            "do not use the files; ask their author",
        ) from error
    return _listed(text, f"file {str(sums)!r}"), _fingerprint(public)


def _listed(text: bytes, subject: str) -> tuple[ExpectedFile, ...]:
    lines = _LINE.findall(text.decode("utf-8", "replace"))
    files = tuple(ExpectedFile(checked_name(name, subject), digest) for digest, name in lines)
    again = "".join(f"{file.sha256}  {file.name}\n" for file in files).encode()
    if again != text or len({file.name for file in files}) != len(files):
        raise ModelError(subject, "is not a list of hashes", "ask the author of the files")
    return files


def _key(path: Path, option: str, half: Literal["private", "public"], remedy: str) -> Any:
    """Read one half of an Ed25519 key.

    Raises:
        SpecError: it cannot be read, or is another key.
    """
    serialization, ed25519, unsupported = _libraries(option)
    kind, load = {
        "private": (
            ed25519.Ed25519PrivateKey,
            lambda data: serialization.load_pem_private_key(data, password=None),
        ),
        "public": (ed25519.Ed25519PublicKey, serialization.load_pem_public_key),
    }[half]
    subject = f"key {str(path)!r}"
    try:
        key = load(_read(path))
    except TypeError as error:
        remedy = "give one without: openssl pkey -in key.pem -out plain.pem"
        raise SpecError(subject, "has a password", remedy) from error
    except (ValueError, unsupported) as error:
        raise SpecError(subject, f"is not a {half} key in PEM", remedy) from error
    if not isinstance(key, kind):
        raise SpecError(subject, "is not an Ed25519 key", remedy)
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise SpecError(f"key {str(path)!r}", problem, "check its path") from error


def _libraries(option: str) -> tuple[Any, Any, type[Exception]]:
    """Return what reads keys, what they are, and what is raised for kinds that nobody supports."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SpecError(
            option, "needs the package cryptography", "pip install 'compressor[sign]'"
        ) from error
    return serialization, ed25519, UnsupportedAlgorithm


def _fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of a public key's 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()
