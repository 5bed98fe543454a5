"""Artifacts of every kind, small ones, and bits that flip in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import NamedTuple

import onnx_ir as ir
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from compressor.cli.application import application
from compressor.errors import InputError
from compressor.exporters import SafetensorsExporter
from compressor.exporters.archive.exporter import ArchiveExporter
from compressor.lab.verify.verify import Proof, verify
from compressor.models.codec.headers import read_header
from compressor.types.proofs import sealed_text
from tests.compressor.exporters.hand_made import CONTEXT, quantized
from tests.compressor.tiny_project import Project


class Flip(NamedTuple):
    """A bit of a file that is another one."""

    path: Path
    byte: int
    bit: int


def exported(project: Project) -> Path:
    """Run a spec with every format that a machine without a GPU writes; return its folder."""
    project.spec["exports"] = [
        {"format": "onnx", "external-data": "always"},
        {"format": "safetensors"},
        {"format": "archive"},
    ]
    project.run()
    return project.output


def pair(folder: Path) -> Path:
    folder.mkdir()
    SafetensorsExporter().write(quantized(ir.DataType.INT4, None, blocks=True), folder, CONTEXT)
    return folder


def shards(folder: Path) -> Path:
    folder.mkdir()
    options = {"max_shard_size": 600}
    carrier = quantized(ir.DataType.INT8)
    SafetensorsExporter.model_validate(options).write(carrier, folder, CONTEXT)
    return folder


def archive(folder: Path) -> Path:
    folder.mkdir()
    return ArchiveExporter().write(quantized(ir.DataType.INT8), folder, CONTEXT)[0]


def engine(folder: Path) -> Path:
    folder.mkdir()
    path, plan = folder / "model.engine", bytes(range(256)) * 4
    path.write_bytes(plan)
    row = {"name": "fc", "type": "gemm", "precision": "int8", "nodes": ["fc"]}
    row |= {key: [] for key in ("inputs", "constants", "outputs")}
    document = {
        "schema": 1,
        "kind": "tensorrt-engine",
        "engine": {"bytes": len(plan), "sha256": sha256(plan).hexdigest()},
        "versions": {"tensorrt-rtx": "1"},
        "profiles": {},
        "layers": [row],
        "quantized": [],
    }
    (folder / "model.engine.json").write_text(sealed_text(document))
    return path


def quantized_folder(folder: Path) -> Path:
    """Write what ``compress quantize`` does of two linear layers."""
    torch.manual_seed(0)
    weights = {f"layers.{i}.weight": torch.randn(32, 64) for i in range(2)}
    folder.mkdir()
    save_file({**weights, "norm.weight": torch.ones(64)}, folder / "in.safetensors")
    arguments = ["quantize", str(folder / "in.safetensors"), "-o", str(folder / "out")]
    arguments += ["--preset", "int4-g32", "--quiet", "--no-check"]
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 0, result.output
    return folder / "out"


BUILDERS: dict[str, Callable[[Path], Path]] = {
    "pair": pair,
    "shards": shards,
    "archive": archive,
    "engine": engine,
    "quantize": quantized_folder,
}


def files_of(path: Path) -> list[Path]:
    """Return the files that belong to an artifact."""
    folder = path if path.is_dir() else path.parent
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return [p for p in files if ".compressor" not in p.relative_to(folder).parts]


def random_flips(files: Sequence[Path], count: int, seed: int) -> Iterator[Flip]:
    """Choose bits: of each file equally many."""
    noise = Random(seed)
    for number in range(count):
        path = files[number % len(files)]
        yield Flip(path, noise.randrange(path.stat().st_size), noise.randrange(8))


@contextmanager
def flipped(flip: Flip) -> Iterator[None]:
    """Flip a bit, and flip it back."""
    data = flip.path.read_bytes()
    other = bytearray(data)
    other[flip.byte] ^= 1 << flip.bit
    flip.path.unlink()  # it may have a second name, in the store
    flip.path.write_bytes(other)
    yield
    flip.path.write_bytes(data)


def hit(flip: Flip) -> str:
    """Return the tensor that a flip is in; empty where it is in none, or nobody can tell."""
    if flip.path.suffix != ".safetensors":
        return ""
    for tensor in read_header(flip.path).tensors.values():
        if tensor.offset <= flip.byte < tensor.offset + tensor.nbytes:
            return tensor.name
    return ""


def complaint(path: Path, key: Path | None = None) -> str:
    """Verify what is not as it was written; return what is said about it."""
    try:
        proof = verify(path, key)
    except InputError as error:
        return str(error)
    assert not proof.ok
    return told(proof)


def told(proof: Proof) -> str:
    return "; ".join(
        f"{file.name} {file.state} {file.detail}"
        for file in proof.files
        if file.state != "unchanged"
    )
