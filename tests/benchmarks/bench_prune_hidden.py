"""Nats a character that channels of a decoder's residual stream cost, by what chooses them.

Tables, no assertions. Only the stream is cut: heads and MLPs keep their widths. What remains is
solved on calibration text (``reconstruct``) but for two rows. Each network is written as a
directory of its class and judged as transformers opens that; a GPT-NeoX, whose configuration cannot
state a width that its heads do not fill, as a module. Then all channels are cut together to a share
of the weights, by the default scope; layers differ in width, and the module is judged. Losses are
means over 64 windows of held-out text, each minus the float model's; the interval is that of the
mean over windows.

Three networks: the Llama of the samples, a Qwen3 of another width, which is trained here with tied
embeddings, so that its output layer gets a weight of its own first, and a GPT-NeoX with layer
norms, trained the same way.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.exporters import SafetensorsExporter
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, open_blocks
from compressor.models.transformers.carrier import open_pretrained
from compressor.passes.prepare.rotated_decoder import untied
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext
from tests.benchmarks.bench_rotate import saved, trained
from tests.benchmarks.language import LENGTH, Logits, nats
from tests.benchmarks.marks import benchmark
from tests.compressor.passes.quantize.static_models import Given

pytestmark = benchmark(seconds=7200)
SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
WINDOWS = 64  # 16,384 characters, at even distances
TEXTS, BATCH = 128, 8
RATIOS = (0.1, 0.2, 0.3)
HELD = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query_key_value", "dense_h_to_4h")
WEIGHTS, WHOLE = 0.7, ("l2", "reconstruction", "principal-components")
WAYS: tuple[tuple[str, bool], ...] = (
    ("random", True),
    ("l2", True),
    ("taylor", True),
    ("reconstruction", True),
    ("principal-components", True),
    ("l2", False),
    ("principal-components", False),
)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_hidden_size(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = SAMPLE / "checkpoint"
    encode: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens_of(path: Path) -> Tensor:
        text = path.read_text(encoding="utf-8")
        return torch.tensor(encode(text, add_special_tokens=False)["input_ids"])

    if name != "llama":
        whole = Path(os.environ.get("COMPRESSOR_DATA", "")) / "tinyshakespeare.txt"
        if not whole.is_file():
            pytest.skip("COMPRESSOR_DATA has no tinyshakespeare.txt")
        tokens = tokens_of(whole)
        folder = trained(tmp_path / "trained", tokens[: len(tokens) * 9 // 10], name)
    if name == "qwen3":
        own = untied(open_blocks(folder))
        assert isinstance(own, BlockCheckpoint)
        folder = saved(own, None, tmp_path / name)
    heads = transformers.AutoConfig.from_pretrained(folder).num_attention_heads
    unseen, known = tokens_of(SAMPLE / "evaluation.txt"), tokens_of(SAMPLE / "calibration.txt")
    windows = unseen[: len(unseen) // LENGTH * LENGTH - LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    windows = windows[:: len(windows) // WINDOWS][:WINDOWS]
    rows = known[: TEXTS * LENGTH].reshape(-1, LENGTH)
    context = PassContext(samples=Given([{"input_ids": b.numpy()} for b in rows.split(BATCH)]))

    def judged(place: Path) -> Tensor:
        return nats(Logits(transformers.AutoModelForCausalLM.from_pretrained(place)), windows)

    def pruned(**options: Any) -> Any:
        given = {**options, "round_to": heads}
        return PruneStructured.model_validate(given, strict=False).apply(carrier, context, {})

    def shown(lost: Tensor) -> str:
        return f"{float(lost.mean()):.4f} ± {1.96 * float(lost.std()) / len(lost) ** 0.5:.4f}"

    def width_of(after: Any) -> int:
        return int(after.tensors()["lm_head.weight"].shape[1])

    def cut(ratio: float, criterion: str, reconstruct: bool) -> str:
        options = {"target": {"ratio": ratio}, "layers": kept}
        begun = time.process_time()
        after = pruned(**options, criterion=criterion, reconstruct=reconstruct).carrier
        seconds = time.process_time() - begun
        if name == "gpt_neox":
            width, lost = width_of(after), nats(Logits(after.module), windows) - reference
            return f"{width}: {shown(lost)} ({seconds:.0f} s)"
        out = tmp_path / f"{criterion}-{ratio}-{reconstruct}"
        out.mkdir()
        SafetensorsExporter(layout="compressed-tensors").write(after, out, USUAL)
        width = transformers.AutoConfig.from_pretrained(out).hidden_size
        return f"{width}: {shown(judged(out) - reference)} ({seconds:.0f} s)"

    # transformers wants the width of a Llama to be a multiple of the number of heads.
    carrier = open_pretrained("AutoModelForCausalLM", folder, {}, ())
    reference = judged(folder)
    names = [n for n in HELD if any(layer.name.endswith(n) for layer in carrier.layers())]
    kept = [{"match": f"*{n}", "skip": True} for n in names]
    with capsys.disabled():
        print(f"\n{name}: float {reference.mean():.5f} nats a character, {len(windows)} windows")
        for criterion, reconstruct in WAYS:
            title = criterion + ("" if reconstruct else ", as cut")
            found = [cut(ratio, criterion, reconstruct) for ratio in RATIOS]
            print(f"{title:32}" + "".join(f"{each:>30}" for each in found), flush=True)
        print(f"all channels, {WEIGHTS:g} of the weights")
        for criterion in WHOLE:
            outcome = pruned(target={"parameters": WEIGHTS}, criterion=criterion)
            lost = nats(Logits(outcome.carrier.module), windows) - reference
            print(f"{criterion:32}{width_of(outcome.carrier)}: {shown(lost)}", flush=True)
