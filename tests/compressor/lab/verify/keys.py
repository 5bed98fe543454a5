"""Keys that sign, always the same."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def write_keys(folder: Path, seed: int, password: bytes = b"") -> tuple[Path, Path]:
    """Write a private and a public key."""
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    hidden = form.BestAvailableEncryption(password) if password else form.NoEncryption()
    private, public = folder / f"key{seed}.pem", folder / f"public{seed}.pem"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, hidden))
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public
