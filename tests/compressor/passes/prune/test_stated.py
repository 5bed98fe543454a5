"""Channels that go in step, so that ``config.json`` states what remains."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.errors import SpecError
from compressor.exporters import SafetensorsExporter
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.smaller_module import random_batch, run_module
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.classes import auto_class_for
from compressor.passes.prune.criteria import Queue, allowed_counts
from compressor.passes.prune.structured.stated import KEPT
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.passes.prune.structured.ties import Tie, tied
from compressor.progress import quiet_libraries
from compressor.run.evaluate import RunSamples
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.tiny_directories import class_of, save_tiny

LAYOUT = SafetensorsExporter(layout="compressed-tensors")
CONTEXT = PassContext(targets=LAYOUT.targets)
IDS = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
PIXELS = (TensorSpec("pixel_values", ("batch", 3, 32, 32), "float32"),)
TEXTS = (*IDS, TensorSpec("decoder_input_ids", ("batch", "time"), "int64"))


def queue(first: int, values: list[float], minimum: int = 1) -> Queue:
    count = len(values)
    units = np.arange(first, first + count)
    return Queue(units, np.array(values), allowed_counts(count, 1, minimum))


def test_tied_groups_lose_the_same_share() -> None:
    """Two heads stand for eight channels."""
    channels, heads = queue(0, [1.0] * 4 + [3.0] * 4), queue(8, [2.0, 4.0])
    tie = tied((1, 2), [channels.remaining, heads.remaining])
    assert tie == Tie((1, 2), (Fraction(1, 2), Fraction(1)))
    joined = tie.queue([queue(20, [0.0]), channels, heads])
    assert joined.units.tolist() == [0, 1, 2, 3, 8, 4, 5, 6, 7, 9]
    assert joined.values.tolist() == [1.5] * 5 + [3.5] * 5
    assert joined.remaining.tolist() == [5, 10]
    assert joined.first(4).tolist() == []
    assert joined.first(5).tolist() == [0, 1, 2, 3, 8]
    assert joined.nearest(0.6).tolist() == [0, 1, 2, 3, 8]


def test_what_a_step_is_worth_rises() -> None:
    tie = tied((0, 1), [queue(0, [1.0, 2.0, 9.0]).remaining] * 2)
    assert tie is not None
    joined = tie.queue([queue(0, [1.0, 2.0, 9.0]), queue(3, [7.0, 1.0, 1.0])])
    assert joined.units.tolist() == [0, 3, 1, 4, 2, 5]
    assert joined.values.tolist() == [4.0, 4.0, 4.0, 4.0, 5.0, 5.0]


def test_groups_without_a_common_share_are_not_tied() -> None:
    assert tied((0, 1), [queue(0, [1.0] * 3).remaining, queue(3, [1.0] * 4).remaining]) is None


def opened(kind: str, folder: Path, inputs: tuple[TensorSpec, ...]) -> TorchCarrier:
    pytest.importorskip("transformers")
    save_tiny(folder, kind)
    return open_pretrained(auto_class_for(class_of(kind).__name__), folder, {}, inputs)


def test_the_plan_names_what_no_configuration_states(tmp_path: Path) -> None:
    """The stream of DINOv2 reaches an output, and its heads are a share of it."""
    carrier = opened("dinov2", tmp_path / "whole", PIXELS)
    step = PruneStructured.model_validate({"target": {"ratio": 0.5}})
    rows = {row.name: row for row in step.survey(carrier, CONTEXT).layers}
    kept = {name.rpartition(".")[2] for name, row in rows.items() if row.reason == KEPT}
    assert kept == {"q_proj", "k_proj", "v_proj"}
    assert any(" of " in row.action for row in rows.values())
    free = step.survey(carrier, PassContext()).layers
    assert not any(row.reason == KEPT for row in free)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "inputs", "target", "changed"),
    [
        ("llama", IDS, {"macs": 0.6}, {"intermediate_size"}),
        # Heads are as wide as the stream divided by their number: both lose the same share.
        ("bert", IDS, {"macs": 0.5}, {"hidden_size", "num_attention_heads"}),
        # The table of tokens is multiplied by the root of the stream's width, which stays.
        ("gemma", IDS, {"ratio": 0.5}, {"intermediate_size"}),
        # The streams of encoder and decoder reach outputs, and heads are a share of them.
        ("bart", TEXTS, {"ratio": 0.5}, {"encoder_ffn_dim", "decoder_ffn_dim"}),
        # Queries, keys and values come in four blocks, whatever the number of heads is.
        ("codegen", IDS, {"ratio": 0.5}, {"n_inner"}),
        ("falcon", IDS, {"ratio": 0.5}, {"ffn_hidden_size"}),
    ],
)
def test_the_directory_is_opened_by_its_class(
    kind: str,
    inputs: tuple[TensorSpec, ...],
    target: dict[str, float],
    changed: set[str],
    tmp_path: Path,
) -> None:
    carrier = opened(kind, tmp_path / "whole", inputs)
    step = PruneStructured.model_validate({"target": target})
    context = replace(CONTEXT, samples=RunSamples(inputs, None, 0))
    small = step.apply(carrier, context, {}).carrier
    LAYOUT.check(step.preview(carrier, CONTEXT, {}))
    out = tmp_path / "out"
    out.mkdir()
    LAYOUT.write(small, out, ExportContext("smaller", "0" * 64))
    before, after = (
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for folder in (tmp_path / "whole", out)
    )
    assert changed <= {key for key in after if after[key] != before.get(key)}
    with quiet_libraries():
        read = class_of(kind).from_pretrained(out).eval()
    batch = random_batch(inputs)
    wanted: Any = list(small.runner().run(batch).values())
    for found, want in zip(run_module(read, inputs, batch), wanted, strict=True):
        assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "inputs", "target", "message"),
    [
        # BLOOM's slopes keep its heads, which keep its stream; its MLPs are four times as wide.
        ("bloom", IDS, {"ratio": 0.5}, r"layout: compressed-tensors: .*; export layout: graph"),
        ("dinov2", PIXELS, {"macs": 0.4}, r"set it to .* or export layout: graph alone"),
    ],
)
def test_what_no_configuration_states_is_said_by_the_plan(
    tmp_path: Path, kind: str, inputs: Any, target: dict[str, float], message: str
) -> None:
    carrier = opened(kind, tmp_path / "whole", inputs)
    step = PruneStructured.model_validate({"target": target})
    with pytest.raises(SpecError, match=message):
        step.survey(carrier, CONTEXT)
    assert step.survey(carrier, PassContext()).layers
