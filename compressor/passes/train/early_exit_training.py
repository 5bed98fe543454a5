"""Heads of early exits, and where wanted the whole network, trained by self-distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.distill_losses import kl_divergence
from compressor.passes.train.job import Objective
from compressor.passes.train.steps import Micro


class FrozenTrunk(NamedModule):
    """A module that runs as in evaluation while its heads are trained: its statistics stay."""

    def train(self, mode: bool = True) -> FrozenTrunk:  # noqa: ARG002
        """Stay in evaluation mode."""
        super().train(False)
        return self


@dataclass(frozen=True)
class SelfDistillation:
    """What exits learn from: the labels, and the network's own answer.

    L. Zhang et al., Be your own teacher, 2019 (arXiv:1905.08094), section 3.2, without the loss of
    features. Gradients do not flow into the teacher.

    Attributes:
        exits: outputs of the heads.
        teacher: output with the network's own logits.
        alpha: weight of the labels; the network's answer has the rest.
        temperature: of both logits.
        labelled: the loss of each exit against the labels; empty where alpha is 0.
        network: the loss of the network itself, where it is trained too.
    """

    exits: Sequence[str]
    teacher: str
    alpha: float
    temperature: float
    labelled: Mapping[str, Objective]
    network: Objective | None = None

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return one term for each exit, and one for the network where it is trained."""
        own = outputs[self.teacher].detach()
        found = {} if self.network is None else dict(self.network.losses(outputs, micro, step))
        for number, name in enumerate(self.exits, start=1):
            soft = kl_divergence(outputs[name], own, self.temperature)
            term = (1 - self.alpha) * soft
            if name in self.labelled:
                hard = self.labelled[name].losses(outputs, micro, step)
                term = term + self.alpha * sum(hard.values())
            found[f"exit {number}"] = term
        return found
