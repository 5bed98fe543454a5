"""The tiny-llama sample: what its README states about checkpoint, text and training holds."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import samples
from compressor.models.transformers.carrier import open_pretrained
from compressor.run.data import open_data
from compressor.spec.load import load_spec

FOLDER = Path(samples.__file__).parent / "tiny-llama"
CHECKPOINT = FOLDER / "checkpoint"
STATED = 1.61809  # nats a character on all of evaluation.txt, in the README
STATED_FIRST = 1.48274  # and on its first 8192 characters


@pytest.fixture(scope="module")
def train() -> ModuleType:
    # The folder's name has a dash, so it is no package.
    spec = importlib.util.spec_from_file_location("tiny_llama_train", FOLDER / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tokens(name: str) -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return torch.tensor(tokenizer.encode((FOLDER / name).read_text(encoding="utf-8")).ids)


def bigram_loss(known: np.ndarray, unseen: np.ndarray, letters: int) -> float:
    """Return the nats a character of counted pairs, each counted once more than it occurs."""
    counts = np.ones((letters, letters))
    np.add.at(counts, (known[:-1], known[1:]), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(chances[unseen[:-1], unseen[1:]]).mean())


@pytest.mark.parametrize(("known", "narrow"), [({}, False), ({"avx512_bf16": True}, True)])
def test_products_are_of_bfloat16_where_the_processor_has_them(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, known: dict[str, bool], narrow: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    seen = set[torch.dtype]()
    size = train.Size(width=8, inner=8, layers=1, steps=1, rate=1e-3, batch=1)
    model = train.untrained(size, 5)
    model.lm_head.register_forward_hook(lambda *given: seen.add(given[2].dtype))
    train.train(model, torch.zeros(600, dtype=torch.int64), size)
    assert seen == {torch.bfloat16 if narrow else torch.float32}


@pytest.mark.slow
def test_checkpoint_reaches_the_stated_loss(train: ModuleType) -> None:
    carrier = open_pretrained("AutoModelForCausalLM", CHECKPOINT, {}, ())
    loss = train.held_out_loss(carrier.module, tokens("evaluation.txt"))
    assert loss == pytest.approx(STATED, abs=2e-4)


def test_checkpoint_has_learned_more_than_pairs(train: ModuleType) -> None:
    carrier = open_pretrained("AutoModelForCausalLM", CHECKPOINT, {}, ())
    unseen = tokens("evaluation.txt")[: 32 * 256 + 1]
    loss = train.held_out_loss(carrier.module, unseen)
    assert loss == pytest.approx(STATED_FIRST, abs=2e-4)
    pairs = bigram_loss(tokens("calibration.txt").numpy(), unseen.numpy(), 66)
    # About 2.5 nats: a perplexity more than twice as high.
    assert math.exp(pairs) > 2 * math.exp(loss)


def test_spec_reads_the_windows_that_training_was_judged_on(train: ModuleType) -> None:
    spec = load_spec(FOLDER / "spec.yaml")
    data = open_data(spec, spec.inputs, ())
    unseen = tokens("evaluation.txt").numpy()
    batch = data["evaluation"].first(3)
    assert batch["input_ids"].tolist() == unseen[: 3 * 256].reshape(3, 256).tolist()
    assert batch["labels"].tolist() == unseen[1 : 3 * 256 + 1].reshape(3, 256).tolist()
    assert data["evaluation"].samples == (len(unseen) - 1) // train.LENGTH == 435
    assert data["calibration"].samples == 128


def test_sizes(train: ModuleType) -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 2_000_000
    texts = [FOLDER / name for name in ("calibration.txt", "evaluation.txt")]
    assert sum(file.stat().st_size for file in texts) < 200_000
    stated = {"3m": 3_181_824, "small": 460_160}
    for name, size in train.SIZES.items():
        with torch.device("meta"):
            assert train.untrained(size, 66).num_parameters() == stated[name]
        # Every matrix divides into groups of 128.
        assert size.width % 128 == size.inner % 128 == 0


def test_texts_are_parts_of_the_whole(train: ModuleType) -> None:
    folder = os.environ.get("COMPRESSOR_DATA")
    if not folder or not (Path(folder) / "tinyshakespeare.txt").exists():
        pytest.skip("COMPRESSOR_DATA holds no tinyshakespeare.txt")
    known, unseen = train.split((Path(folder) / "tinyshakespeare.txt").read_text(encoding="utf-8"))
    assert unseen == (FOLDER / "evaluation.txt").read_text(encoding="utf-8")
    assert known.endswith((FOLDER / "calibration.txt").read_text(encoding="utf-8"))
    stored = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(train.tokenizer_of(known).to_str())["model"] == stored["model"]


@pytest.mark.slow
def test_a_few_steps_of_training_help_and_are_the_same_each_time(train: ModuleType) -> None:
    known, unseen = tokens("calibration.txt")[:20_000], tokens("evaluation.txt")[:3000]
    size = train.Size(width=128, inner=128, layers=1, steps=12, rate=1e-2, batch=8)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = train.untrained(size, 66)
        before = train.held_out_loss(model.eval(), unseen)
        train.train(model, known, size)
        losses.append(train.held_out_loss(model, unseen))
    assert losses[0] == losses[1]
    assert losses[0] < 3.4 < 4.1 < before


def test_windows_cover_the_text(train: ModuleType) -> None:
    torch.manual_seed(0)
    size = train.Size(width=128, inner=128, layers=1, steps=5, rate=1.0, batch=4)
    batches = list(train.windows(torch.arange(256 * 8), size))
    assert [tuple(batch.shape) for batch in batches[:2]] == [(4, 257), (3, 257)]
    assert len(batches) == 5
    starts = torch.cat(batches[:2])[:, 0].sort().values
    assert starts.diff().tolist() == [256] * 6
