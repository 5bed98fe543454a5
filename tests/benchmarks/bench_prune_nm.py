"""Perplexity of the sample language model after pruning single weights, by pass and pattern.

The checkpoint and both texts are those of ``samples/tiny-llama``. Calibration takes 128 windows of
256 characters, which the model was trained on; perplexity is over the windows of the held-out
text, side by side. Losses are paired: nats a character on the same windows, pruned minus dense;
the interval is that of their mean over windows.
"""

from __future__ import annotations

import time
from math import exp
from pathlib import Path

import pytest
from torch import Tensor

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.sparse.passes import PruneNm, PruneSparsegpt, PruneWanda
from compressor.types.carrier import Carrier
from compressor.types.passes import Pass
from tests.benchmarks.language import Setting, compressed, language_setting, nats

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-llama"
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


@pytest.fixture(scope="module")
def setting() -> Setting:
    pytest.importorskip("transformers")
    names = ("calibration.txt", "evaluation.txt")
    texts = [(SAMPLE / name).read_text(encoding="utf-8") for name in names]
    return language_setting(SAMPLE / "checkpoint", texts)


def loss(carrier: Carrier, windows: Tensor) -> Tensor:
    """Return each window's mean nats a character."""
    assert isinstance(carrier, TorchCarrier)
    return nats(carrier.module, windows)


def magnitude_rows() -> dict[str, Pass]:
    """Return the pass that prunes single weights by magnitude, as the other passes' baseline."""
    from compressor.passes.prune.magnitude.magnitude import PruneMagnitude

    return {"50 % magnitude": PruneMagnitude.model_validate({"sparsity": 0.5})}


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_pruned_language_model(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reference = loss(setting.carrier, setting.windows)
    dense = float(reference.mean())
    with capsys.disabled():
        print(f"\ndense: perplexity {exp(dense):.3f}, {dense:.4f} nats a character")
        print(f"{'':26}{'perplexity':>12}{'lost nats':>12}{'±':>9}{'zeros %':>9}{'seconds':>9}")
        for title, declared in {**ROWS, **magnitude_rows()}.items():
            start = time.perf_counter()
            outcome = compressed(setting, declared, tmp_path)
            seconds = time.perf_counter() - start
            lost = loss(outcome.carrier, setting.windows) - reference
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
