"""A checkpoint's open block lies in mapped files, and is run no further than it has to be."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compressor.models.transformers.block_checkpoint import open_blocks, opened_block
from compressor.passes.prune.sparse import pruning
from compressor.run.blocks.decoder_blocks import DecoderBlocks, OpenBlock
from tests.compressor.run.blocks.test_decoder_blocks import GPTQ, SIZES, WORDS, folder_of, passed


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, WORDS, (8, 24))
    np.savez(tmp_path / "tokens.npz", input_ids=tokens)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2})
    folder_of(tmp_path / "half", config, torch.bfloat16)
    return tmp_path


def in_files(module: torch.nn.Module) -> dict[str, bool]:
    """Say of each matrix of a module whether its numbers lie in a mapped file."""
    areas = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, _, *name = line.split(maxsplit=5)
        if device != "00:00" and name:
            areas.append([int(end, 16) for end in span.split("-")])
    return {
        name: any(start <= matrix.data_ptr() < end for start, end in areas)
        for name, matrix in module.named_parameters()
        if matrix.dim() > 1
    }


def test_the_matrices_of_an_open_block_take_no_anonymous_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of half floats, and of what a pass has put in their place; room is left for its work."""
    module = opened_block(open_blocks(llama / "half"), 0, llama)
    found = in_files(module)
    assert list(found.values()) == [True] * 7, found
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert sorted(path.name for path in llama.iterdir()) == ["half", "tokens.npz"], "no names left"
    seen: list[dict[str, bool]] = []
    run_on = DecoderBlocks._run_on

    def noted(self: DecoderBlocks, opened: OpenBlock) -> None:
        seen.append(in_files(opened.module))
        run_on(self, opened)

    monkeypatch.setattr(DecoderBlocks, "_run_on", noted)
    carrier = passed(llama, "half", GPTQ, llama / "out")
    assert [list(each.values()) for each in seen] == [[True] * 7], seen
    judged: Any = opened_block(carrier, 0, llama)
    assert all(in_files(judged).values())
    layer = next(x for x in carrier.layers() if x.name == "model.layers.0.mlp.up_proj")
    codes = carrier.tensors()[layer.weight].codes
    assert codes is not None
    assert torch.equal(judged.mlp.up_proj.weight, codes.read(carrier.weight).dequantize())


def test_a_block_is_run_as_far_as_its_statistics(llama: Path, monkeypatch: pytest.MonkeyPatch):
    found: Counter[str] = Counter()
    forward = torch.nn.Linear.forward
    places: dict[int, str] = {}  # of the modules of the block that is open

    def counted(self: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
        found[places.get(id(self), "outside")] += 1
        return forward(self, values)

    opener = OpenBlock.module.fget
    assert opener is not None

    def module(self: OpenBlock) -> torch.nn.Module:
        opened: torch.nn.Module = opener(self)
        places.clear()
        places.update({id(m): f"{self.index}.{n}" for n, m in opened.named_modules()})
        return opened

    monkeypatch.setattr(OpenBlock, "module", property(module))
    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    passed(llama, "half", GPTQ, llama / "out")
    batches = 2
    # For o_proj's input, for down_proj's, and for what enters the next block, if there is one.
    expected = {"0.self_attn.q_proj": 3, "0.self_attn.o_proj": 2, "0.mlp.up_proj": 2}
    expected |= {"0.mlp.down_proj": 1, "1.self_attn.q_proj": 2, "1.self_attn.o_proj": 1}
    expected |= {"1.mlp.up_proj": 1}
    assert {name: found[name] for name in expected} == {
        name: count * batches for name, count in expected.items()
    }
    assert "1.mlp.down_proj" not in found, "nothing follows it"


def test_what_a_block_was_pruned_by_is_gone_before_the_next(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """A factor takes as much as the moment, and as much again while it is inverted."""
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    curvature, run_on = pruning.curvature, DecoderBlocks._run_on

    def noted(moment: torch.Tensor) -> Any:
        alive.append(sum(each() is not None for each in made))
        found = curvature(moment)
        made.append(weakref.ref(found))
        return found

    def watched(self: DecoderBlocks, opened: OpenBlock) -> None:
        alive.append(sum(each() is not None for each in made))
        run_on(self, opened)

    monkeypatch.setattr(pruning, "curvature", noted)
    monkeypatch.setattr(DecoderBlocks, "_run_on", watched)
    passed(llama, "half", {"pass": "prune-sparsegpt", "n": 2, "m": 4}, llama / "out")
    assert len(made) >= 2 * 4, "of what the layers of a block read"
    assert not any(alive), alive
