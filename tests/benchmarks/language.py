"""What benchmarks of language models share: the model as logits, its texts, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.graph.blocks import partition
from compressor.models.torch.carrier import TorchCarrier
from compressor.run.blocks.blockwise import Feed, GraphBlocks
from compressor.types.passes import Outcome, Pass, PassContext
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.passes.quantize.static_models import Given

LENGTH, SEQUENCES, BATCH = 256, 128, 8


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
    """A float model, what calibrates it, and what it is measured on.

    Attributes:
        carrier: the float model, lowered.
        calibration: batches of sequences from text that it was trained on.
        windows: windows of held-out text side by side, ``[N, LENGTH + 1]``.
    """

    carrier: TorchCarrier
    calibration: list[Batch]
    windows: Tensor


def language_setting(folder: Path | str, texts: Sequence[str]) -> Setting:
    """Open a Hugging Face directory.

    Args:
        folder: holds the model and its tokenizer.
        texts: what it was trained on, and what was held out.
    """
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    known, unseen = (
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
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
def nats(model: nn.Module, windows: Tensor) -> Tensor:
    """Return each window's mean nats a character."""
    found = []
    for batch in windows.split(32):
        logits = model(batch[:, :-1]).transpose(1, 2)
        found.append(functional.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1))
    return torch.cat(found).to(torch.float64)


def compressed(setting: Setting, declared: Pass, folder: Path) -> Outcome:
    """Apply a pass, calibrated if it wants it."""
    context = PassContext()
    survey = declared.survey(setting.carrier, context)
    if not declared.by_block:
        return declared.apply(setting.carrier, context, {})
    graph = setting.carrier.graph()
    feed = Feed(setting.calibration, folder)
    blocks = GraphBlocks(graph, partition(graph), survey.requests, feed)
    samples = Given(setting.calibration)
    return declared.apply(setting.carrier, replace(context, blocks=blocks, samples=samples), {})
