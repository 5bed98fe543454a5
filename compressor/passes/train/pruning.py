"""Zeros that stay zero, and weights that become zero, while a network is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from compressor.errors import SpecError
from compressor.passes.prune.criteria import cubic_sparsity
from compressor.passes.prune.magnitude.magnitude import number_of
from compressor.passes.prune.magnitude.ranking import Criterion, scores
from compressor.passes.train.job import Regulator
from compressor.types.layers import Layer
from compressor.types.options import Options
from compressor.types.tensors import below

_MASK = "mask:"
_START = "start:"


class Gradual(Options):
    """Pruning while training: weights of least magnitude are zeroed, ever fewer at a time."""

    target: float = Field(gt=0, lt=1, description="share of the weights that is zero at the end")
    scope: Literal["global", "local"] = Field(
        default="local",
        description="local zeroes the same share of each layer; global ranks all weights together",
    )
    begin: float = Field(
        default=0.0, ge=0, lt=1, description="share of the training before the first pruning"
    )
    end: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="share of the training after which all weights are pruned",
    )
    every: int = Field(default=10, ge=1, description="steps from one pruning to the next")
    block: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = Field(
        default=(1, 1), description="rows and columns that are zeroed together"
    )
    rewind: int | None = Field(
        default=None,
        ge=0,
        description="after the last pruning (of each round, if there are rounds), reset the other "
        "weights to their values after this many steps, and continue training (the lottery "
        "ticket); default: they keep their values",
    )
    rounds: int | None = Field(
        default=None,
        ge=1,
        description="number of rounds: in each, the network is trained and then loses the same "
        "share of the remaining weights; a last part trains what remains. The learning-rate "
        "schedule restarts in each, at the step of rewind",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Gradual:
        curve = {"begin", "end", "every"} & self.model_fields_set
        if self.rounds is not None and curve:
            raise ValueError(f"{min(curve)} is for pruning without rounds; remove one of them")
        if self.end <= self.begin:
            raise ValueError(f"end {self.end:g} is not after begin {self.begin:g}")
        return self

    def parts(self, steps: int) -> Parts:
        """Return how a training of so many steps is divided."""
        return Parts(steps, self.rounds or 0, self.rewind or 0)

    def ends(self, steps: int) -> tuple[int, ...]:
        """Return the steps after which weights are pruned and, if it is set, rewound.

        Raises:
            SpecError: the step to rewind to is not before them, or a part has no step.
        """
        parts = self.parts(steps)
        ends = parts.ends or (max(1, round(self.end * steps) - 1),)
        if len(set(ends)) < len(ends) or parts.length < 2:
            raise SpecError(
                "prune.rounds",
                f"is {self.rounds}, and the training has {steps} steps",
                "set fewer rounds, or more epochs",
            )
        if self.rewind is not None and self.rewind >= ends[0]:
            raise SpecError(
                "prune.rewind",
                f"is {self.rewind}, and weights are pruned after step {ends[0] + 1} of {steps}",
                f"set less than {ends[0]}, or train longer",
            )
        return ends


@dataclass(frozen=True)
class Parts:
    """How the steps of a training are divided by rounds of pruning.

    All parts end at the same step of the schedule; those after the first begin at the step that
    is rewound to.

    >>> parts = Parts(20, rounds=2, rewind=1)
    >>> [parts.place(step) for step in (0, 7, 8, 13, 14, 19)]
    [(0, 8), (7, 8), (2, 8), (7, 8), (2, 8), (7, 8)]

    Attributes:
        steps: of the whole training.
        rounds: prunings, each after a part; 0 leaves the training whole.
        rewind: the step of the first part that later ones begin behind.
    """

    steps: int
    rounds: int = 0
    rewind: int = 0

    @property
    def length(self) -> int:
        """Steps of the first part."""
        return self.steps - self.rounds * self._later

    @property
    def _later(self) -> int:
        """Steps of each later part."""
        return max(0, self.steps - self.rewind) // (self.rounds + 1)

    @property
    def ends(self) -> tuple[int, ...]:
        """The last step of each part but the last: then weights are pruned."""
        return tuple(self.length + i * self._later - 1 for i in range(self.rounds))

    def place(self, step: int) -> tuple[int, int]:
        """Return where in the schedule a step is, and of how many steps that is."""
        if step < self.length:
            return step, self.length
        return self.length - self._later + (step - self.length) % self._later, self.length


class ZerosKept(Regulator):
    """Makes weights that were zero before a training zero after each of its steps.

    A weight that is zero everywhere was never pruned: some layers begin like that. The masks show
    where the named parameters that are zero in part are not.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        self._parameters = dict(module.named_parameters())
        alive = {name: self._parameters[name].detach() != 0 for name in names}
        self.masks = {name: mask for name, mask in alive.items() if mask.any() and not mask.all()}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Make the zeros zero again: momentum and weight decay move them, too.

        Raises:
            SpecError: a parameter has another shape here because it is spread over processes.
        """
        for name, mask in self.masks.items():
            parameter = self._parameters[name]
            if parameter.shape != mask.shape:
                raise SpecError(
                    f"parameter {name!r}",
                    "is spread over processes and cannot be masked",
                    "train pruned networks without FSDP",
                )
            parameter.mul_(mask.to(parameter.device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the masks."""
        return {_MASK + name: mask for name, mask in self.masks.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the masks of the interrupted training."""
        self.masks = below(_MASK, state)


class GradualPruning(ZerosKept):
    """Zeroes ever more weights of least magnitude while they are trained.

    The share follows M. Zhu and S. Gupta, To prune, or not to prune, 2017 (arXiv:1710.01878),
    section 3. Rewinding to early values: J. Frankle and M. Carbin, The lottery ticket hypothesis,
    2019 (arXiv:1803.03635), and J. Frankle et al., 2020 (arXiv:1912.05671), who rewind to a step
    after the first. They prune in rounds, each time the same share of what is left; so do A. Renda
    et al., Comparing rewinding and fine-tuning in neural network pruning, 2020 (arXiv:2003.02389),
    who rewind the learning rate alone. Layers are given by the parameter that is their weight.
    """

    def __init__(
        self, module: nn.Module, layers: Mapping[str, Layer], options: Gradual, steps: int
    ):
        super().__init__(module, ())
        self._layers = layers
        self._options = options
        self._begin = round(options.begin * steps)
        self._ends = options.ends(steps)
        self._start: dict[str, Tensor] = {}

    def before(self, step: int) -> None:
        """Keep the values to rewind to."""
        if step == self._options.rewind:
            self._start = {n: p.detach().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Prune if it is due, and zero what was pruned."""
        share = self._due(step)
        if share is not None:
            alone = [[name] for name in self._layers]
            whole = self._options.scope == "global"
            for names in [list(self._layers)] if whole else alone:
                self._prune(names, share)
        if step in self._ends:
            for name, value in self._start.items():
                self._parameters[name].copy_(value)
        if step == self._ends[-1]:
            self._start = {}
        super().after(step)

    def _due(self, step: int) -> float | None:
        """Return the share of the weights to be pruned after a step, if some are to be."""
        options, end = self._options, self._ends[-1]
        if options.rounds is not None:
            if step not in self._ends:
                return None
            gone = (self._ends.index(step) + 1) / options.rounds
            return float(1 - (1 - options.target) ** gone)
        if not self._begin <= step <= end:
            return None
        if (step - self._begin) % options.every and step != end:
            return None
        return cubic_sparsity(step + 1, self._begin, end + 1, options.target)

    def _prune(self, names: Sequence[str], share: float) -> None:
        """Mask a share of the blocks of some layers, ranked together."""
        height, width = self._options.block
        criterion = Criterion("l1", (height, width))
        by_layer = []
        for name in names:
            matrix = self._layers[name].canonical(self._parameters[name].detach())
            blocks, shift = scores(matrix, criterion)
            by_layer.append(blocks.to(torch.int64).flatten() << shift)
        ranked = torch.cat(by_layer)
        pruned = torch.zeros(len(ranked), dtype=torch.bool, device=ranked.device)
        pruned[torch.argsort(ranked, stable=True)[: number_of(share, len(ranked))]] = True
        parts = torch.split(pruned, [len(blocks) for blocks in by_layer])
        for name, part in zip(names, parts, strict=True):
            layer = self._layers[name]
            blocks = part.reshape(layer.rows // height, layer.columns // width)
            matrix = blocks.repeat_interleave(height, 0).repeat_interleave(width, 1)
            self.masks[name] = ~layer.stored(matrix)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the masks, and the values to rewind to."""
        return super().state_dict() | {_START + name: value for name, value in self._start.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._start = below(_START, state)
