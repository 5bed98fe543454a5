"""Losses, sample by sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from compressor.errors import DataError
from compressor.passes.train.finetune import TaskLoss
from compressor.passes.train.losses import cross_entropy, kl_divergence, squared_error
from compressor.run.metrics.class_metrics import PERPLEXITY


def test_cross_entropy_is_the_metrics_log_loss() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6, 5), torch.randint(0, 5, (4, 6))
    labels[1, 2:] = -100
    found = cross_entropy(logits, labels)
    wanted = PERPLEXITY.per_sample({"y": logits.numpy()}, labels.numpy(), 4)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)


def test_pixels_have_their_classes_where_metrics_see_them() -> None:
    """As many classes as columns would fit both axes."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 2, 3, 6, 6)
    labels = torch.randint(0, 3, (2, 6, 6))
    found = cross_entropy(logits, labels)
    wanted = functional.cross_entropy(logits, labels, reduction="none").flatten(1).mean(1)
    torch.testing.assert_close(found, wanted)
    last = logits.movedim(1, -1)
    torch.testing.assert_close(cross_entropy(last, labels), wanted)
    ours, theirs = logits.log_softmax(1), teacher.log_softmax(1)
    each = (theirs.exp() * (theirs - ours)).sum(1).flatten(1).mean(1)
    torch.testing.assert_close(kl_divergence(logits, teacher, 1.0), each)
    half = labels > 0
    counted = (theirs.exp() * (theirs - ours)).sum(1) * half
    wanted = counted.flatten(1).sum(1) / half.flatten(1).sum(1)
    torch.testing.assert_close(kl_divergence(logits, teacher, 1.0, half), wanted)


def test_a_sample_without_labels_costs_nothing() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.tensor([[-100, -100, -100], [0, 1, 2]])
    found = cross_entropy(logits, labels)
    assert found[0] == 0
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert not logits.grad[0].any()
    assert logits.grad[1].any()


def test_16_bit_logits_are_summed_in_32() -> None:
    assert cross_entropy(torch.randn(2, 3).half(), torch.tensor([0, 1])).dtype == torch.float32


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0]])
def test_labels_must_be_classes(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="for 3 classes"):
        cross_entropy(torch.randn(2, 3), torch.tensor(labels))


def test_as_many_labels_as_rows() -> None:
    with pytest.raises(ValueError, match="4 labels for 2 rows"):
        cross_entropy(torch.randn(2, 3), torch.zeros(2, 2))


def test_squared_errors() -> None:
    outputs, target = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1, 0], [3, 4]])
    assert squared_error(outputs, target).tolist() == [2.0, 0.5]
    with pytest.raises(ValueError, match="targets"):
        squared_error(outputs, target[:, :1])


def test_smoothed_labels_are_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator)
    labels = torch.tensor([0, 4, 2, -100, 1, 3])
    smoothed = cross_entropy(logits, labels, 0.1)
    truth = torch.full((6, 5), 0.02).scatter(1, labels.clamp(0)[:, None], 0.92)
    expected = -(truth * logits.log_softmax(1)).sum(1)
    expected[3] = 0.0  # does not count
    torch.testing.assert_close(smoothed, expected)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (("a", "b"), r"loss 'my:loss' of outputs .*a.*b.*: raised KeyError: 'scores'"),
        (("a",), "loss 'my:loss': raised .*Error"),
    ],
)
def test_what_the_users_loss_raises_is_told_with_the_outputs(
    outputs: tuple[str, ...], message: str
) -> None:
    def loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return outputs["scores"] - target

    data: Any = SimpleNamespace(data=SimpleNamespace(target="label"), load_symbol=lambda *_: loss)
    micro: Any = SimpleNamespace(tensors={"label": torch.zeros(4)}, mixed=None)
    made = TaskLoss("my:loss", outputs, data)
    with pytest.raises(DataError, match=message):
        made.losses({name: torch.zeros(4, 2) for name in outputs}, micro, 0)
