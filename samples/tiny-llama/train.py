"""Train a small Llama on Shakespeare, character by character, and save a Hugging Face directory.

    python samples/tiny-llama/train.py tinyshakespeare.txt -o out/llama-3m

takes about ten minutes on two CPU cores for the default size (3.2 M parameters). Without a path the
text is looked for in the folder that COMPRESSOR_DATA names. The last tenth of the text plays no
part in training; the loss on it is printed.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "tinyshakespeare.txt"
SEED = 0
UNKNOWN = "<unk>"
LENGTH = 256
WARM_UP = 0.05
HELD_OUT = 0.1


@dataclass(frozen=True)
class Size:
    """A network and how long to train it.

    Attributes:
        width: of the residual stream; it and ``inner`` divide into groups of 128.
        inner: width of the gated layers between.
        layers: decoder blocks.
        steps: optimizer steps, each on ``batch`` sequences of 256 characters.
        rate: the highest learning rate.
        batch: sequences in a step.
    """

    width: int
    inner: int
    layers: int
    steps: int
    rate: float
    batch: int = 16


SIZES = {
    "3m": Size(width=256, inner=768, layers=4, steps=1000, rate=3e-3),
    "small": Size(width=128, inner=256, layers=3, steps=1200, rate=5e-3),
}


def split(text: str) -> tuple[str, str]:
    """Return the part to train on and the last tenth, which is held out."""
    edge = len(text) - int(len(text) * HELD_OUT)
    return text[:edge], text[edge:]


def tokenizer_of(text: str) -> Tokenizer:
    """Return a tokenizer with one token a character that occurs, and one for all others."""
    vocabulary = {c: i for i, c in enumerate(sorted(set(text)))}
    vocabulary[UNKNOWN] = len(vocabulary)
    # Byte-pair encoding without merges leaves single characters.
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def untrained(size: Size, vocabulary: int) -> LlamaForCausalLM:
    """Return the network before training: 4 heads, of which two share a key and value head."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def windows(tokens: Tensor, size: Size) -> Iterator[Tensor]:
    """Yield ``size.steps`` batches ``[size.batch, LENGTH + 1]``: each epoch every character once.

    The start of the first window is drawn for each epoch, so that epochs cut differently.
    """
    left = size.steps
    while left:
        start = int(torch.randint(LENGTH, ()))
        starts = torch.arange(start, len(tokens) - LENGTH, LENGTH)
        starts = starts[torch.randperm(len(starts))]
        for first in range(0, len(starts), size.batch)[:left]:
            batch = starts[first : first + size.batch]
            yield torch.stack([tokens[s : s + LENGTH + 1] for s in batch])
            left -= 1


def rate_factor(step: int, steps: int) -> float:
    """Return the share of the highest learning rate: a linear start, then half a cosine to 0."""
    warm = WARM_UP * steps
    done = max(0.0, step - warm) / (steps - warm)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * done))


def loss_of(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean nats a character of ``[N, length + 1]`` tokens."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def multiplies_bfloat16() -> bool:
    """Return whether the processor says that it has products of bfloat16.

    Elsewhere they take many times as long as those of float32.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # before PyTorch 2.12
        return False
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def train(model: LlamaForCausalLM, tokens: Tensor, size: Size) -> None:
    """Train in place by AdamW; weights in float32, products in bfloat16 if the processor has it."""
    narrow = multiplies_bfloat16()
    optimizer = torch.optim.AdamW(
        model.parameters(), size.rate, betas=(0.9, 0.98), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate_factor(s, size.steps))
    model.train(True)
    for step, batch in enumerate(windows(tokens, size), 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {size.steps}: {loss.item():.3f} nats a character", flush=True)
    model.train(False)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokens: Tensor, length: int = LENGTH) -> float:
    """Return the mean nats a character on windows side by side; what is left over is not used."""
    count = (len(tokens) - 1) // length
    starts = torch.arange(count) * length
    rows = torch.stack([tokens[s : s + length + 1] for s in starts])
    batches = [rows[first : first + 32] for first in range(0, count, 32)]
    losses = [loss_of(model, batch) * len(batch) for batch in batches]
    return float(torch.stack(losses).sum()) / count


def main() -> None:
    """Train, print loss and time, and save the directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, nargs="?", help="tinyshakespeare.txt")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--size", choices=SIZES, default="3m")
    arguments = parser.parse_args()
    text: Path = arguments.text or Path(os.environ.get("COMPRESSOR_DATA", "")) / TEXT
    if not text.is_file():
        parser.error(f"{str(text)!r} does not exist; name tinyshakespeare.txt")
    size = SIZES[arguments.size]
    trained_on, unseen = split(text.read_text(encoding="utf-8"))
    tokenizer = tokenizer_of(trained_on)
    torch.manual_seed(SEED)
    model = untrained(size, tokenizer.get_vocab_size())
    start = time.perf_counter()
    train(model, torch.tensor(tokenizer.encode(trained_on).ids), size)
    loss = held_out_loss(model, torch.tensor(tokenizer.encode(unseen).ids))
    print(
        f"{model.num_parameters():,} parameters, held out {loss:.5f} nats a character "
        f"(perplexity {math.exp(loss):.3f}), {time.perf_counter() - start:.0f} s"
    )
    model.save_pretrained(arguments.output)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # so it is in transformers
        tokenizer_object=tokenizer, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
