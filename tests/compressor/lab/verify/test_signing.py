"""Signatures: who wrote the files, and that all of them are as they were then."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from compressor.cli.application import application
from compressor.errors import InputError, ModelError, SpecError
from compressor.lab.verify import signing
from compressor.lab.verify.verify import sign, verify
from tests.compressor.lab.verify.proved import (
    archive,
    complaint,
    files_of,
    flipped,
    pair,
    random_flips,
)
from tests.compressor.tiny_project import onnx_project

pytest.importorskip("cryptography", reason="signatures need the extra compressor[sign]")

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.compressor.lab.verify.keys import write_keys

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A signed folder, and the public key."""
    private, public = write_keys(tmp_path, 1)
    folder = pair(tmp_path / "one")
    (folder / "README.md").write_text("read me")
    proof = sign(folder, private)
    assert proof.ok
    assert proof.key
    return folder, public


def test_what_was_signed_is_proved(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    proof = verify(folder, public)
    assert proof.ok
    names = [file.name for file in proof.files]
    assert names == ["README.md", "model.json", "model.safetensors"]
    assert verify(folder).ok  # the signature is not in the way
    (folder / ".compressor").mkdir()
    (folder / ".compressor" / "lock").write_text("")
    assert verify(folder, public).ok


def test_the_hashes_are_those_of_sha256sum(signed: tuple[Path, Path]) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum")
    folder, _ = signed
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_key_made_with_openssl(signed: tuple[Path, Path], tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    commands = [
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(private)],
        ["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)],
    ]
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    folder = signed[0]
    sign(folder, private)
    assert verify(folder, public).ok
    check = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    check += ["-in", SUMS, "-sigfile", SIGNATURE]
    assert subprocess.run(check, cwd=folder, capture_output=True, check=False).returncode == 0


def check_flips(folder: Path, public: Path, count: int) -> None:
    for flip in random_flips(files_of(folder), count, 7):
        with flipped(flip):
            assert flip.path.name.removesuffix(".sig") in complaint(folder, public)
    assert verify(folder, public).ok


def test_a_flipped_bit_is_noticed(signed: tuple[Path, Path]) -> None:
    check_flips(*signed, 12)


@pytest.mark.slow
def test_many_flipped_bits_are_noticed(signed: tuple[Path, Path]) -> None:
    check_flips(*signed, 1000)


def test_files_that_were_added_or_removed(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / "model.py").write_text("")
    assert complaint(folder, public) == "model.py new "
    (folder / "model.py").unlink()
    (folder / "README.md").unlink()
    assert complaint(folder, public) == "README.md missing "


def test_another_key(signed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = signed
    with pytest.raises(ModelError, match=r"was not made with the key of .*public2\.pem"):
        verify(folder, write_keys(tmp_path, 2)[1])


def test_a_list_that_somebody_else_made(signed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, public = signed
    private = write_keys(tmp_path, 1)[0]
    key = form.load_pem_private_key(private.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    for text in (f"{'0' * 64}  ../x\n", "not a list\n", f"{'0' * 64}  a\n" * 2, f"{'0' * 64}  a"):
        (folder / SUMS).write_text(text)
        (folder / SIGNATURE).write_bytes(key.sign(text.encode()))
        with pytest.raises(ModelError, match=r"not a file in its folder|is not a list of hashes"):
            verify(folder, public)


def test_what_was_changed_is_not_signed(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, 1)
    folder = pair(tmp_path / "one")
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    assert not sign(folder, private).ok
    assert not (folder / SUMS).exists()


def test_what_is_not_signed(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    with pytest.raises(InputError, match="is not signed: there is no SHA256SUMS"):
        verify(folder, write_keys(tmp_path, 1)[1])


def test_one_file(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, 1)
    path = archive(tmp_path / "one")
    assert sign(path, private).ok
    assert (path.parent / "model.archive.SHA256SUMS.sig").is_file()
    (path.parent / "note.txt").write_text("is not part of it")
    assert verify(path, public).ok
    with path.open("ab") as stream:
        stream.write(b"x")
    assert complaint(path, public).startswith("model.archive changed")


def test_signatures_of_single_files_are_not_in_the_way(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, 1)
    project = onnx_project(tmp_path / "run")
    project.run()
    folder = project.output
    for path in (folder, folder / "model.onnx", folder):
        assert sign(path, private).ok
        assert verify(folder).ok
        assert verify(folder, public).ok
    assert verify(folder / "model.onnx", public).ok
    (folder / "other.onnx.SHA256SUMS").write_text("")
    assert complaint(folder) == "other.onnx.SHA256SUMS new "
    names = signing.with_signatures(["a", "b.mlpackage/c"])
    assert {"a.SHA256SUMS.sig", SUMS, f"b.mlpackage/{SIGNATURE}"} < names


def test_keys_that_are_none(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    private, public = write_keys(tmp_path, 1)
    other = tmp_path / "ec.pem"
    curve = ec.generate_private_key(ec.SECP256R1())
    plain = form.NoEncryption()
    other.write_bytes(curve.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, plain))
    hidden, _ = write_keys(tmp_path, 3, b"secret")
    cases = [
        (public, "is not a private key in PEM; make one with: openssl genpkey"),
        (other, "is not an Ed25519 key"),
        (hidden, "has a password"),
        (tmp_path / "none.pem", "cannot be read"),
    ]
    for key, message in cases:
        with pytest.raises(SpecError, match=message):
            sign(folder, key)
    sign(folder, private)
    for key, message in [(private, "is not a public key in PEM"), (tmp_path / "none.pem", "read")]:
        with pytest.raises(SpecError, match=message):
            verify(folder, key)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pair(tmp_path / "one")
    for name in ("cryptography.hazmat.primitives", "cryptography.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    for command in (sign, verify):
        with pytest.raises(SpecError, match=r"pip install 'compressor\[sign\]'"):
            command(folder, tmp_path / "key.pem")


def test_the_command(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    private, public = write_keys(tmp_path, 1)
    command = ["verify", str(folder)]
    done = CliRunner().invoke(application, [*command, "--sign", str(private)])
    assert done.exit_code == 0
    assert "signed by the key" in done.stdout
    done = CliRunner().invoke(application, [*command, "--key", str(public), "--json"])
    document = json.loads(done.stdout)
    assert (document["ok"], document["by"], len(document["key"])) == (True, SIGNATURE, 64)
    both = CliRunner().invoke(application, [*command, "--key", "a", "--sign", "b"])
    assert both.exit_code == 2
    (folder / SIGNATURE).write_bytes(b"0" * 64)
    failed = CliRunner().invoke(application, [*command, "--key", str(public)])
    assert failed.exit_code == 3


def test_the_names_of_a_signature(tmp_path: Path) -> None:
    assert signing.signature_names(tmp_path) == (SUMS, SIGNATURE)
