"""Archives: bytes against Shannon's entropy, zip and xz; speed of unpacking; a small ResNet-20.

Tables, no assertions. Entropy is that of the codes alone (order 0, each tensor for itself), and so
are the bytes beside it; whole files are compared with whole files. The control of the pruned
network is the float one, fine-tuned with the same recipe without pruning: these JPEG copies lift
any model that is trained on them.
"""

from __future__ import annotations

import lzma
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compressor.calibration.collect import collect
from compressor.exporters import ArchiveExporter, SafetensorsExporter
from compressor.exporters.archive.coder import threads
from compressor.exporters.archive.exporter import pack
from compressor.exporters.archive.forms import entropy
from compressor.exporters.archive.unpacking import ArchiveFormat
from compressor.models.codec.bit_stream import pack_bits, unpack_bits
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.cluster import Cluster
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.passes.train.finetune import Finetune
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import ExportContext
from compressor.types.layers import Scheme
from compressor.types.passes import PassContext
from samples.cifar.data import normalize
from tests.benchmarks.bench_distill import training
from tests.benchmarks.bench_prune_resnet20 import (
    INPUTS,
    accuracy,
    batches,
    images,
    published,
)
from tests.benchmarks.bench_prune_resnet20 import pytestmark as pytestmark
from tests.benchmarks.bench_resnet20 import show

unpack = ArchiveFormat().unpack
stored_bytes = ArchiveFormat().stored_bytes

PLAIN = PassContext(0, frozenset({"ort-cpu"}), "accuracy")
CONTEXT = ExportContext("resnet-20", "0" * 64)
ROWS, COLUMNS, MATRICES = 2048, 2048, 12  # 50 MB of codes with 8 bits
ROUNDS = 5
CALIBRATED = 512
RECIPE: dict[str, Any] = {"epochs": 8.0, "optimizer": "sgd", "learning_rate": 0.01}
SPARSITY = 0.7


def statically(carrier: Carrier) -> Carrier:
    """Quantize weights and activations to 8 bits."""
    declared = QuantizeStatic()
    requests = declared.survey(carrier, PLAIN).requests
    taps = dict.fromkeys(t for r in requests for t in r.tensors if t != INPUTS[0].name)
    runner = carrier.runner(tuple(taps))
    held = images("cifar10_train4000.npz")["image"][:CALIBRATED]
    found = collect(
        lambda batch: {**batch, **runner.run(batch)},
        batches({"image": held, "label": held}),
        requests,
    )
    return declared.apply(carrier, PLAIN, found).carrier


def gaussian(folder: Path, bits: int) -> tuple[Path, ...]:
    """Write codes of Gaussian matrices, one scale a row."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    scheme = Scheme(bits, narrow=False)
    for index in range(MATRICES * 8 // bits):
        codes = round_to_nearest(torch.randn(ROWS, COLUMNS, generator=draw), scheme, "mse").codes
        tensors[f"layers.{index}.weight"] = codes if bits == 8 else pack_bits(codes, bits)
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return (path,)


def sparse(folder: Path, bits: int) -> tuple[Path, ...]:
    """Write codes of Gaussian matrices nine of ten of which are zero, as pruning leaves them."""
    draw, zero = torch.Generator().manual_seed(0), 1 << (bits - 1)
    tensors = {}
    for index in range(MATRICES * 8 // bits):
        weights = torch.randn(ROWS, COLUMNS, generator=draw)
        steps = torch.where(weights.abs() > 1.645, weights * (zero / 4), 0).round()
        codes = (steps + zero).clamp(0, 2 * zero - 1).to(torch.uint8)
        tensors[f"layers.{index}.weight"] = codes if bits == 8 else pack_bits(codes, bits)
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return (path,)


def of_resnet(folder: Path, bits: int) -> tuple[Path, ...]:
    """Write ResNet-20 quantized to so many bits."""
    fused = Fuse().apply(published(), PLAIN, {}).carrier
    if bits == 8:
        carrier = statically(fused)
    else:
        carrier = QuantizeWeights(bits=4).apply(fused, PLAIN, {}).carrier
    return SafetensorsExporter(layout="graph").write(carrier, folder, CONTEXT)


def code_entropy(files: Sequence[Path], bits: int) -> dict[str, float]:
    """Return the entropy of each tensor of codes in bytes, by name."""
    found = {}
    with safe_open(files[0], framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if tensor.dtype in (torch.uint8, torch.int8) and tensor.numel() > 64:
                data = tensor.view(torch.uint8).reshape(-1)
                codes = data if bits == 8 else unpack_bits(data, bits, data.numel() * 8 // bits)
                found[name] = entropy(codes.numpy())
    return found


def zipped(files: Sequence[Path], target: Path) -> int:
    """Return the bytes of a zip file, level 9."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for file in files:
            out.write(file, file.name)
    return target.stat().st_size


def xz(files: Sequence[Path]) -> int:
    """Return the bytes of the files, each coded by LZMA at its usual level."""
    return sum(len(lzma.compress(file.read_bytes())) for file in files)


@pytest.mark.parametrize("source", [of_resnet, gaussian, sparse])
@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_and_speed(source: Any, bits: int, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    files = source(tmp_path / "files", bits)
    plain = size_of(files)
    path = tmp_path / "model.archive"
    begin, before = time.perf_counter(), time.process_time()
    pack(files, path, ArchiveExporter().level, lambda _: None)
    packing = plain / 1e6 / (time.process_time() - before)
    writing = plain / 1e6 / (time.perf_counter() - begin)
    ideal = code_entropy(files, bits)
    stored = stored_bytes(path)
    coded = sum(stored[name] for name in ideal)
    seconds, busy = [], []
    for turn in range(ROUNDS):
        begin, before = time.perf_counter(), time.process_time()
        unpack(path, tmp_path / f"out{turn}")
        seconds.append(time.perf_counter() - begin)
        busy.append(time.process_time() - before)
    size = path.stat().st_size
    rows = [
        ["files", f"{plain:,}", "", ""],
        ["entropy of the codes", "", f"{sum(ideal.values()):,.0f}", "1.0000"],
        ["archive", f"{size:,}", f"{coded:,}", f"{coded / sum(ideal.values()):.4f}"],
        ["zip -9", f"{zipped(files, tmp_path / 'z'):,}", "", ""],
        ["xz -6", f"{xz(files):,}", "", ""],
    ]
    show(f"{source.__name__}, {bits} bits", ["", "bytes", "codes alone", "to entropy"], rows)
    speeds = (f"{plain / 1e6 / t:.0f}" for t in (min(seconds), np.median(seconds), min(busy)))
    show(
        f"MB of files a second; {len(seconds)} times, {threads()} threads",
        ["", "least time", "median", "a second of one core"],
        [["unpack", *speeds], ["pack", f"{writing:.1f}", "", f"{packing:.1f}"]],
    )


def right(runner: Runner) -> float:
    """Return the share of right predictions on the test images in percent."""
    data, found = images("cifar10_test2000.npz"), 0
    for start in range(0, len(data["label"]), 250):
        part = normalize({"image": data["image"][start : start + 250]})
        (output,) = runner.run(part).values()
        found += int((output.argmax(1) == data["label"][start : start + 250]).sum())
    return 100 * found / len(data["label"])


def tuned(folder: Path, options: dict[str, Any]) -> TorchCarrier:
    """Train the published network."""
    start = published()
    declared = Finetune.model_validate({**RECIPE, **options})
    given = training(folder / "state", folder / "cache", start)
    found = declared.apply_training(start, PLAIN, {}, replace(given)).carrier
    assert isinstance(found, TorchCarrier)
    return found


def exported(exporter: Any, carrier: Carrier, folder: Path) -> tuple[tuple[Path, ...], Runner]:
    """Export a model; return the files, and what runs them."""
    folder.mkdir()
    files = exporter.write(carrier, folder, CONTEXT)
    return files, exporter.open(files[0])


def size_of(files: Sequence[Path]) -> int:
    """Return the bytes of files together."""
    return sum(file.stat().st_size for file in files)


def test_pruned_and_clustered(tmp_path: Path) -> None:
    test, start = images("cifar10_test2000.npz"), published()
    reference = accuracy(start.module, test)
    plain = size_of(exported(SafetensorsExporter(layout="graph"), start, tmp_path / "float")[0])
    control = tuned(tmp_path / "control", {})
    pruned = tuned(tmp_path / "pruned", {"prune": {"target": SPARSITY}})
    weights = [pruned.weight(layer) for layer in pruned.layers()]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    rows = [
        ["float, published", f"{plain:,}", "1.0", f"{reference:.2f}", "0.00"],
        [
            "float, fine-tuned: the control",
            "",
            "",
            f"{accuracy(control.module, test):.2f}",
            f"{accuracy(control.module, test) - reference:+.2f}",
        ],
        [
            f"pruned, {zeros:.1%} zeros",
            "",
            "",
            f"{accuracy(pruned.module, test):.2f}",
            f"{accuracy(pruned.module, test) - reference:+.2f}",
        ],
    ]
    fused = Fuse().apply(pruned, PLAIN, {}).carrier
    for bits in (5, 4, 3):
        clustered = Cluster(bits=bits).apply(fused, PLAIN, {}).carrier
        for name, exporter in (
            ("safetensors", SafetensorsExporter(layout="graph")),
            ("archive", ArchiveExporter()),
        ):
            files, runner = exported(exporter, clustered, tmp_path / f"{name}{bits}")
            own = right(runner)
            shown = [f"{own:.2f}", f"{own - reference:+.2f}"]
            sizes = {name: size_of(files)}
            if name == "safetensors":
                sizes["zip -9 of it"] = zipped(files, tmp_path / f"zip{bits}")
                sizes["xz -6 of it"] = xz(files)
            for what, size in sizes.items():
                title = f"pruned, fused, cluster {bits} bits: {what}"
                rows.append([title, f"{size:,}", f"{plain / size:.1f}", *shown])
    show(
        f"ResNet-20, {RECIPE['epochs']:g} epochs on 4,000 images; top-1 % on 2,000 images",
        ["network", "bytes", "times smaller", "top-1", "to published"],
        rows,
    )
