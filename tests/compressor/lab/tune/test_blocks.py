"""A bare checkpoint that is tuned: it runs over data that are known beforehand, from its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import transformers

from compressor.lab.tune.answer import Goal
from compressor.lab.tune.tune import tune
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from tests.compressor.run.blocks.test_decoder_blocks import SIZES, WORDS, folder_of, value_of


def test_a_checkpoint_is_searched_and_judged_on_data_of_its_own(tmp_path: Path) -> None:
    folder_of(tmp_path / "wide", transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    step = {"pass": "quantize-weights", "method": "rtn", "bits": 8}
    value = value_of(tmp_path, "wide", step, tmp_path / "out")
    for role in ("calibration", "search", "evaluation"):
        tokens = np.random.default_rng(len(role)).integers(0, WORDS, (24, 12))
        np.savez(tmp_path / f"{role}.npz", input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        value["data"][role] = {
            "npz": str(tmp_path / f"{role}.npz"),
            "inputs": {"input_ids": "input_ids"},
            "target": "labels",
            "batch": 4,
        }
    value["metric"] = "perplexity"
    found = tune(check_spec(Document(tmp_path / "spec.yaml", value)), Goal(1000.0, rounds=0))
    assert found.answer.verdict == "passed"
    assert found.answer.point is not None
    assert found.answer.point.drop is not None
