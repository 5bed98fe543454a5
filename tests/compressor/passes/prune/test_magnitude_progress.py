"""How far prune-magnitude is while it reads weights: shown as other long work is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ModelError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.passes.prune.magnitude import cuts as magnitude_cuts
from compressor.passes.prune.magnitude.magnitude import PruneMagnitude
from compressor.progress import Advance
from compressor.report.run import run_spec
from compressor.run.options import RunOptions
from compressor.spec.load import load_spec
from compressor.types.passes import PassContext

ROWS, COLUMNS, LAYERS = 40, 30, 3
ALL = LAYERS * ROWS * COLUMNS
RANK = "prune-magnitude: rank weights"


class Watcher:
    """Keeps what stages were shown, and how far each came."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.counts: dict[str, list[int]] = {}
        self.open: list[str] = []

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Advance]:
        counts = self.counts.setdefault(description, [])

        def advance(done: int, text: str = "") -> None:
            counts.append(done)

        self.stages.append((description, total))
        self.open.append(description)
        try:
            yield advance
        finally:
            self.open.remove(description)

    def note(self, message: str) -> None:
        pass


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, COLUMNS)
    return {
        f"layers.{i}.fc.weight": torch.randn(shape, generator=generator).to(dtype)
        for i in range(LAYERS)
    }


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of ten rows, as if the tensors were large."""
    real = magnitude_cuts.row_blocks
    size = 10 * COLUMNS
    monkeypatch.setattr(magnitude_cuts, "row_blocks", lambda x, multiple: real(x, multiple, size))


def watched(folder: Path, dtype: torch.dtype, scope: str) -> Watcher:
    save_file(tensors(dtype), folder / "model.safetensors")
    carrier = open_checkpoint(folder / "model.safetensors")
    step = PruneMagnitude.model_validate({"sparsity": 0.5, "scope": scope})
    watcher = Watcher()
    outcome = step.apply(carrier, PassContext(progress=watcher), {})
    assert [x.scheme for x in outcome.layers] == [
        x.scheme for x in step.apply(carrier, PassContext(), {}).layers
    ]
    assert watcher.open == []
    return watcher


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_block_that_is_read_is_counted(small_blocks: None, tmp_path: Path, scope: str):
    watcher = watched(tmp_path, torch.bfloat16, scope)
    assert watcher.stages[0] == (RANK, ALL)
    step = 10 * COLUMNS
    assert watcher.counts[RANK] == list(range(step, ALL + 1, step))
    for label, total in watcher.stages[1:]:  # where several share the threshold
        assert label.startswith(f"{RANK} where ")
        assert total is not None
        assert total < ALL
        assert watcher.counts[label][-1] == total


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_second_reading_is_a_stage_of_its_own(small_blocks: None, tmp_path: Path, scope: str):
    watcher = watched(tmp_path, torch.float32, scope)
    assert [label for label, _ in watcher.stages] == [RANK, f"{RANK} more finely"]
    first, second = (total for _, total in watcher.stages)
    assert first == ALL
    # All together: only those layers that have weights near the threshold.
    assert second == ALL if scope == "layer" else second in (ALL // 3, ALL // 3 * 2, ALL)
    assert [counts[-1] for counts in watcher.counts.values()] == [first, second]


def test_a_stage_ends_where_a_weight_cannot_be_ranked(tmp_path: Path):
    held = tensors(torch.float32)
    held["layers.1.fc.weight"][3, 3] = float("nan")
    save_file(held, tmp_path / "model.safetensors")
    watcher = Watcher()
    step = PruneMagnitude(sparsity=0.5)
    carrier = open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layer 'layers\.1\.fc'"):
        step.apply(carrier, PassContext(progress=watcher), {})
    assert watcher.stages == [(RANK, ALL)]
    assert watcher.open == []


def test_a_run_shows_it(tmp_path: Path):
    """The same for whoever watches ``compress run``, inside the stage of the pass."""
    save_file(tensors(torch.bfloat16), tmp_path / "model.safetensors")
    spec = {
        "version": 1,
        "name": "watched",
        "model": {"checkpoint": "model.safetensors"},
        "passes": [{"pass": "prune-magnitude", "sparsity": 0.5}],
        "exports": [{"format": "safetensors"}],
        "limits": {"size-ratio": None},
    }
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec), encoding="utf-8")
    watcher = Watcher()
    run_spec(load_spec(path), RunOptions(), watcher)
    labels = [label for label, _ in watcher.stages]
    step = "step 2 of 5: "
    assert labels.index(f"{step}prune-magnitude") + 1 == labels.index(step + RANK)
    assert watcher.counts[step + RANK][-1] == ALL
