"""Perplexity of the sample language model after pruning single weights, by pass and pattern.

The checkpoint and both texts are those of ``samples/tiny-llama``. Calibration takes 128 windows of
256 characters, which the model was trained on; perplexity is over the windows of the held-out
text, side by side. Losses are paired: nats a character on the same windows, pruned minus dense;
the interval is that of their mean over windows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import exp
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.carriers.torch_carrier import TorchCarrier
from compressor.graph.blocks import partition
from compressor.plan import make_observer
from compressor.run.blockwise import Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, Pass, PassContext
from compressor.types.tensors import Batch, TensorSpec
from passes.prune.nm import PruneNm
from passes.prune.sparsegpt import PruneSparsegpt
from passes.prune.wanda import PruneWanda

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
LENGTH, SEQUENCES, BATCH = 256, 128, 8
ROWS: dict[str, Pass] = {
    "2:4 magnitude": PruneNm(),
    "2:4 magnitude, permuted": PruneNm(permute=True),
    "2:4 wanda": PruneNm(criterion="wanda"),
    "2:4 wanda, permuted": PruneNm(criterion="wanda", permute=True),
    "2:4 sparsegpt": PruneNm(criterion="sparsegpt"),
    "2:4 sparsegpt, permuted": PruneNm(criterion="sparsegpt", permute=True),
    "4:8 sparsegpt": PruneSparsegpt(n=4, m=8),
    "50 % wanda": PruneWanda(),
    "50 % sparsegpt": PruneSparsegpt(),
}


class Logits(nn.Module):
    """A language model from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class Setting:
    """The dense model, what calibrates it, and held-out windows ``[N, LENGTH + 1]``."""

    carrier: TorchCarrier
    calibration: list[Batch]
    windows: Tensor


@pytest.fixture(scope="module")
def setting() -> Setting:
    transformers = pytest.importorskip("transformers")
    folder = SAMPLE / "checkpoint"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    known, unseen = (
        torch.tensor(
            tokenizer((SAMPLE / name).read_text(encoding="utf-8"), add_special_tokens=False)[
                "input_ids"
            ]
        )
        for name in ("calibration.txt", "evaluation.txt")
    )
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(len(known) - LENGTH, (SEQUENCES,), generator=random)
    rows = torch.stack([known[s : s + LENGTH] for s in starts])
    count = (len(unseen) - 1) // LENGTH
    windows = torch.stack([unseen[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    carrier = TorchCarrier(Logits(model), [TensorSpec("tokens", ("batch", "sequence"), "int64")])
    carrier.graph()  # lowered here, so that no pass is charged with it
    return Setting(carrier, [{"tokens": b.numpy()} for b in rows.split(BATCH)], windows)


@torch.inference_mode()
def nats(carrier: Carrier, windows: Tensor) -> Tensor:
    """Return each window's mean nats a character."""
    assert isinstance(carrier, TorchCarrier)
    found = []
    for batch in windows.split(32):
        logits = carrier.module(batch[:, :-1]).transpose(1, 2)
        found.append(functional.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1))
    return torch.cat(found).to(torch.float64)


def pruned(setting: Setting, declared: Pass, folder: Path) -> Outcome:
    """Calibrate, if the pass wants it, and prune."""
    context = PassContext()
    survey = declared.survey(setting.carrier, context)
    if not survey.blockwise:
        return declared.apply(setting.carrier, context, {})
    graph = setting.carrier.graph()
    feed = Feed(setting.calibration, make_observer, folder)
    blocks = GraphBlocks(graph, partition(graph), survey.requests, feed)
    return declared.apply_blockwise(setting.carrier, context, blocks)


def magnitude_rows() -> dict[str, Pass]:
    """Return the pass that prunes single weights by magnitude, as the other passes' baseline."""
    from passes.prune.magnitude import PruneMagnitude

    return {"50 % magnitude": PruneMagnitude.model_validate({"sparsity": 0.5})}


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_pruned_language_model(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reference = nats(setting.carrier, setting.windows)
    dense = float(reference.mean())
    with capsys.disabled():
        print(f"\ndense: perplexity {exp(dense):.3f}, {dense:.4f} nats a character")
        print(f"{'':26}{'perplexity':>12}{'lost nats':>12}{'±':>9}{'zeros %':>9}{'seconds':>9}")
        for title, declared in {**ROWS, **magnitude_rows()}.items():
            start = time.perf_counter()
            outcome = pruned(setting, declared, tmp_path)
            seconds = time.perf_counter() - start
            lost = nats(outcome.carrier, setting.windows) - reference
            interval = 1.96 * float(lost.std()) / len(lost) ** 0.5
            touched = {x.name for x in outcome.layers}
            layers = [x for x in outcome.carrier.layers() if x.name in touched]
            zeros = sum(int((outcome.carrier.weight(x) == 0).sum()) for x in layers)
            share = 100 * zeros / sum(x.parameters for x in layers)
            print(
                f"{title:26}{exp(dense + float(lost.mean())):12.3f}{float(lost.mean()):12.4f}"
                f"{interval:9.4f}{share:9.1f}{seconds:9.1f}",
                flush=True,
            )
