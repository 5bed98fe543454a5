"""prune-magnitude on checkpoints: nothing is held, little is read, and the bytes are the same."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.exporters.safetensors import streaming
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.models.checkpoint import rows as weight_rows
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.checkpoint.reading import FileTensor, RowReader
from compressor.models.checkpoint.rows import ChangedRows
from compressor.passes.prune.magnitude import cuts as magnitude_cuts
from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
from compressor.passes.prune.magnitude.ranking import Criterion, scores
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.report.run import run_spec
from compressor.run.options import RunOptions
from compressor.spec.load import load_spec
from compressor.types.exporter import ExportContext
from tests.compressor.models.checkpoint.llama_files import llama_tensors, write_folder
from tests.compressor.passes.prune.magnitude_models import ANY, matrices

BLOCKS: list[dict[str, Any]] = [
    {},
    {"granularity": "block", "block": (1, 4)},
    {"granularity": "block", "block": (4, 1)},
    {"granularity": "block", "block": (16, 16), "norm": "l2"},
]
PRESETS = ("int8", "int4-g32", "nvfp4")
ONCE = {0, 5, 10, 11}  # places of pairs of both
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> CheckpointCarrier:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder / "model.safetensors")


def mixed_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Layers of three dtypes; coarse values, so that they share magnitudes with each other."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.fc.weight": (
            torch.randn(64, 48, generator=generator).mul(32).round().div(32).to(DTYPES[i % 3])
        )
        for i in range(6)
    } | {"norm.weight": torch.ones(48)}


def by_sorting(
    before: dict[str, torch.Tensor], options: dict[str, Any], share: float, scope: str
) -> dict[str, torch.Tensor]:
    """Prune whole matrices by sorting all scores."""
    block = options.get("block", (1, 1))
    criterion = Criterion(options.get("norm", "l1"), block)
    found = {}
    for name, matrix in before.items():
        own, shift = scores(matrix, criterion)
        found[name] = own.to(torch.int64).reshape(-1) << shift
    groups = [sorted(before)] if scope == "global" else [[name] for name in before]
    after = {}
    for group in groups:
        every = torch.cat([found[name] for name in group])
        gone = torch.zeros(len(every), dtype=torch.bool)
        number = round(100 * share) * len(every) // 100
        gone[torch.argsort(every, stable=True)[:number]] = True
        parts = gone.split([len(found[name]) for name in group])
        for name, part in zip(group, parts, strict=True):
            grid = part.reshape(len(before[name]) // block[0], -1)
            spread = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            after[name] = before[name].masked_fill(spread, 0)
    return after


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def export(carrier: CheckpointCarrier, folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint as a run does, check it, and return its tensors."""
    folder.mkdir()
    exporter = SafetensorsExporter()
    exporter.check(carrier)
    paths = exporter.write(carrier, folder, ExportContext("streamed", "spec"))
    exporter.check_written(carrier, paths[0])
    assert sum(p.stat().st_size for p in folder.iterdir()) == exporter.predict(carrier)
    return {n: t for p in sorted(folder.glob("*.safetensors")) for n, t in load_file(p).items()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few elements at once, here and in the exporter, as if the tensors were large."""
    real = magnitude_cuts.row_blocks
    monkeypatch.setattr(magnitude_cuts, "row_blocks", lambda x, multiple: real(x, multiple, 700))
    monkeypatch.setattr(streaming, "_AT_ONCE", 500)


# ------------------------------------------------------------------------------- what is chosen


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(BLOCKS),
    st.sampled_from(["layer", "global"]),
    st.integers(1, 99).map(lambda percent: percent / 100),
    st.integers(300, 4000),
    st.integers(0, 50),
)
def test_streamed_is_what_sorting_in_memory_gives(
    tmp_path_factory: pytest.TempPathFactory,
    options: dict[str, Any],
    scope: Any,
    share: float,
    elements: int,
    seed: int,
):
    carrier = checkpoint(tmp_path_factory.mktemp("model"), mixed_tensors(seed))
    real = magnitude_cuts.row_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(magnitude_cuts, "row_blocks", lambda x, multiple: real(x, multiple, elements))
        step = PruneMagnitude(sparsity=share, scope=scope, **options)
        outcome = step.apply(carrier, ANY, {})
    expected = by_sorting(matrices(carrier), options, share, scope)
    same(matrices(outcome.carrier), expected)
    blocks = options.get("block", (1, 1))
    for row in outcome.layers:
        own = expected[row.name]
        if blocks == (1, 1):
            zero = 100 * float((own == 0).double().mean())
            assert row.details["zero_percent"] == pytest.approx(zero, abs=1e-4)
            assert row.scheme.endswith(f", {zero:.1f} % zero")


def test_weights_stored_by_columns(tmp_path: Path):
    """GPT-2 keeps its linear layers as [columns, rows]: read as wholes, ranked alike."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "h.0.mlp.c_fc.weight": torch.randn(24, 32, generator=generator),
        "h.0.mlp.c_proj.weight": torch.randn(32, 24, generator=generator),
    }
    write_folder(tmp_path, tensors, config={"model_type": "gpt2"})
    carrier = open_checkpoint(tmp_path)
    assert all(layer.transposed for layer in carrier.layers())
    options: dict[str, Any] = {"granularity": "block", "block": (4, 1)}
    step = PruneMagnitude(sparsity=0.5, scope="global", **options)
    after = step.apply(carrier, ANY, {}).carrier
    expected = by_sorting(matrices(carrier), options, 0.5, "global")
    same(matrices(after), expected)
    assert isinstance(after, CheckpointCarrier)
    found = export(after, tmp_path / "out")
    same(found, {f"{name}.weight": own.T.contiguous() for name, own in expected.items()})


def test_float8_checkpoints(tmp_path: Path, small_blocks: None):
    codes = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    carrier = checkpoint(
        tmp_path / "in",
        {"fc.weight": codes.to(torch.float8_e4m3fn), "fc.weight_scale": torch.full((64, 1), 0.3)},
    )
    after = PruneMagnitude(sparsity=0.5).apply(carrier, ANY, {}).carrier
    assert isinstance(after, CheckpointCarrier)
    expected = by_sorting(matrices(carrier), {}, 0.5, "layer")
    same(export(after, tmp_path / "out"), {"fc.weight": expected["fc"]})


# ------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("options", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_export_is_masked_float(
    tmp_path: Path, small_blocks: None, options: dict[str, Any], dtype: torch.dtype
):
    tensors = llama_tensors(dtype=dtype)
    write_folder(tmp_path / "in", tensors)
    carrier = open_checkpoint(tmp_path / "in")
    rules: list[dict[str, Any]] = [{"match": "lm_head", "skip": True}]
    step = PruneMagnitude.model_validate_json(
        json.dumps({"sparsity": 0.6, "scope": "global", "layers": rules, **options})
    )
    after = step.apply(carrier, ANY, {}).carrier
    assert isinstance(after, CheckpointCarrier)
    ranked = {n: m for n, m in matrices(carrier).items() if n not in ("lm_head", EMBEDDING)}
    expected = {f"{n}.weight": m for n, m in by_sorting(ranked, options, 0.6, "global").items()}
    same(export(after, tmp_path / "out"), tensors | expected)


EMBEDDING = "model.embed_tokens"


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        # Each preset and each block once; all pairs of them are slow.
        pytest.param(preset, options, marks=[] if place in ONCE else [pytest.mark.slow])
        for place, (preset, options) in enumerate(product(PRESETS, BLOCKS))
    ],
)
def test_codes_are_those_of_the_masked_weights(
    tmp_path: Path, small_blocks: None, preset: Any, options: dict[str, Any]
):
    write_folder(tmp_path / "in")
    carrier = open_checkpoint(tmp_path / "in")
    masked = PruneMagnitude(sparsity=0.5, **options).apply(carrier, ANY, {}).carrier
    assert isinstance(masked, CheckpointCarrier)
    quantize = QuantizeWeights(preset=preset)
    first = quantize.apply(masked, ANY, {}).carrier
    # The same, from a file that holds the masked weights.
    write_folder(tmp_path / "masked", {n: t.read() for n, t in masked.tensors().items()})
    second = quantize.apply(open_checkpoint(tmp_path / "masked"), ANY, {}).carrier
    assert isinstance(first, CheckpointCarrier)
    assert isinstance(second, CheckpointCarrier)
    same(export(first, tmp_path / "first"), export(second, tmp_path / "second"))


def test_changes_follow_each_other(tmp_path: Path, small_blocks: None):
    carrier = checkpoint(tmp_path / "in", mixed_tensors())
    tall = {"granularity": "block", "block": (16, 1)}
    wide = {"granularity": "block", "block": (4, 2)}
    once = PruneMagnitude(sparsity=0.3, **tall).apply(carrier, ANY, {}).carrier
    twice = PruneMagnitude(sparsity=0.6, **wide).apply(once, ANY, {}).carrier
    assert isinstance(twice, CheckpointCarrier)
    expected = by_sorting(by_sorting(matrices(carrier), tall, 0.3, "layer"), wide, 0.6, "layer")
    found = export(twice, tmp_path / "out")
    found.pop("norm.weight")
    same(found, {f"{name}.weight": own for name, own in expected.items()})


# ------------------------------------------------------------------------------- what is read


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the rows that are read of each tensor; reading one as a whole is an error."""
    counted: Counter[str] = Counter()
    real = FileTensor.rows

    def rows(self: FileTensor, start: int, stop: int) -> torch.Tensor:
        counted[self.header.name] += stop - start
        return real(self, start, stop)

    def whole(_: Any) -> torch.Tensor:
        raise AssertionError("a tensor was read as a whole")

    monkeypatch.setattr(FileTensor, "rows", rows)
    monkeypatch.setattr(FileTensor, "__call__", whole)
    monkeypatch.setattr(ChangedRows, "__call__", whole)
    return counted


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 1), (torch.float16, 1), (None, 2)])
def test_how_often_weights_are_read(
    tmp_path: Path,
    small_blocks: None,
    rows_read: Counter[str],
    scope: Any,
    dtype: torch.dtype | None,
    times: int,
):
    tensors = {
        f"layers.{i}.fc.weight": torch.randn(200, 70).to(dtype or torch.float32) for i in range(5)
    }
    carrier = checkpoint(tmp_path, tensors)
    step = PruneMagnitude(sparsity=0.5, scope=scope)
    after = step.apply(carrier, ANY, {}).carrier
    # Ties are looked for in ten rows of a layer; of all ranked together, in one layer more.
    again = [rows - 200 * times for rows in rows_read.values()]
    assert sum(rows > 10 for rows in again) <= (scope == "global")
    assert max(again) <= 210
    assert set(rows_read) == set(tensors)
    # Neither is anything read as a whole later on, by quantization or by the exporter.
    quantized = QuantizeWeights(preset="int8").apply(after, ANY, {}).carrier
    assert isinstance(after, CheckpointCarrier)
    assert isinstance(quantized, CheckpointCarrier)
    export(after, tmp_path / "floats")
    export(quantized, tmp_path / "codes")


def test_blocks_of_a_file_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parts that are read ahead must not lie within each other."""
    monkeypatch.setattr(streaming, "_AT_ONCE", 1)
    carrier = checkpoint(tmp_path / "in", mixed_tensors())
    step = PruneMagnitude(sparsity=0.5, granularity="block", block=(16, 2))
    for tensor in step.apply(carrier, ANY, {}).carrier.tensors().values():
        if isinstance(tensor.read, ChangedRows):
            assert isinstance(tensor.read, RowReader)
            cuts = streaming.pieces(tensor, 1)
            assert cuts == [(row, row + 16) for row in range(0, 64, 16)]
            assert len(tensor.read.span(*cuts[0])) == 16 * 48 * tensor.dtype.itemsize


def test_reading_by_threads_keeps_the_order(tmp_path: Path):
    carrier = checkpoint(tmp_path, mixed_tensors())
    blocks = [b for layer in carrier.layers() for b in weight_rows.row_blocks(layer, 1, 300)]
    found = list(weight_rows.scan(carrier, blocks, lambda rows, _: float(rows.double().sum())))
    assert [block for block, _ in found] == blocks
    before = matrices(carrier)
    for block, total in found:
        own = before[block.layer.name][block.start : block.stop]
        assert total == float(own.double().sum())


# ------------------------------------------------------------------------------- a whole run


def test_a_run_prunes_quantizes_and_reports(tmp_path: Path):
    write_folder(tmp_path / "in")
    spec = {
        "version": 1,
        "name": "sparse",
        "model": {"checkpoint": "in"},
        "passes": [
            {"pass": "prune-magnitude", "sparsity": 0.5, "scope": "global"},
            {"pass": "quantize-weights", "preset": "int8"},
        ],
        "exports": [{"format": "safetensors"}],
        "output": "out",
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    result = run_spec(load_spec(tmp_path / "spec.yaml", ()), RunOptions())
    report = json.loads((result.output / "report.json").read_text())
    first = {row["name"]: row for row in report["passes"][0]["layers"]}
    own = first["model.layers.0.self_attn.q_proj"]
    assert own["scheme"].startswith("bfloat16, ")
    assert 40 < own["details"]["zero_percent"] < 60
    assert own["sparsity"] is None
    files = sorted(result.output.glob("*.safetensors"))
    codes = {n: t for path in files for n, t in load_file(path).items()}
    packed = codes["model.layers.0.self_attn.q_proj.weight_packed"].view(torch.uint8)
    zero = 100 * float((packed == 128).double().mean())  # compressed-tensors adds 128
    assert zero >= own["details"]["zero_percent"] - 1e-4  # which is rounded
