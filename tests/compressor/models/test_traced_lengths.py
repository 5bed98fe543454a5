"""A graph is traced where it holds for long inputs, and without masks that forward has not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.masks import without_idle_masks
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")


class Windowed(nn.Module):
    """Shifts a table of relative places, and fills it up where there are few positions."""

    def __init__(self, longest: int = 1000) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(2.0 * longest).reshape(-1, 1))
        self.longest = longest

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            raise ValueError("too long")
        return x * 2 if x.shape[1] > 6 else x + self.table[: x.shape[1]]


@pytest.mark.parametrize(("longest", "positions"), [(1000, 40), (20, 4)])
def test_long_inputs_are_those_that_a_graph_is_made_for(longest: int, positions: int) -> None:
    """With 5 positions as an example, the branch of short inputs was the graph (VITS)."""
    carrier = TorchCarrier(Windowed(longest), [spec("x", "batch", "time", 3)])
    batch = {"x": np.ones((2, positions, 3), np.float32)}
    (have,), (want,) = carrier.runner().run(batch).values(), carrier.module_outputs(batch)
    np.testing.assert_allclose(have, want)


@pytest.mark.parametrize(
    ("padding", "masked"),
    [
        (lambda _: None, False),
        (lambda x: torch.ones(x.shape[:2]), False),
        (lambda x: torch.ones(x.shape[:2], dtype=torch.long).bool(), False),
        (lambda x: torch.ones(x.shape[:2]).index_fill(1, torch.tensor([0]), 0.0), True),
        (lambda x: _changed(torch.ones(x.shape[:2])), True),
        (lambda x: x[..., 0] > 0, True),
    ],
    ids=["none", "ones", "cast", "other", "changed", "given"],
)
def test_no_mask_is_made_where_forward_makes_none(
    padding: Callable[[Tensor], Tensor | None], masked: bool
) -> None:
    """Informer's layers have fewer queries than keys: the mask did not fit.

    Nystromformer's have landmarks in place of queries, and makes a mask of ones.
    """
    transformers = pytest.importorskip("transformers")
    masking = pytest.importorskip("transformers.masking_utils")
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2)
    config._attn_implementation = "sdpa"  # without one, no mask is ever made

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = masking.create_bidirectional_mask(config, x, padding(x))
            return x if mask is None else x[..., :1]

    carrier = TorchCarrier(Masked(), [spec("x", "batch", "time", 16)])
    (made,) = carrier.runner().run({"x": np.ones((2, 5, 16), np.float32)}).values()
    assert made.shape == (2, 5, 1 if masked else 16)


def _changed(mask: Tensor) -> Tensor:
    mask.view(-1)[0] = 0.0
    return mask


def test_a_mask_of_padding_is_made() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    asked = masking._ignore_bidirectional_mask_sdpa
    with without_idle_masks():
        asks = masking._ignore_bidirectional_mask_sdpa
        assert asks(None, 4)
        assert not asks(None, 4, 2)
        assert not asks(torch.tensor([[True, False]]), 2)
    assert masking._ignore_bidirectional_mask_sdpa is asked
