"""Ctrl-C during training: the step is finished and its state saved before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compressor.errors import DataError, ModelError, SpecError
from compressor.passes.train.job import Job
from compressor.passes.train.optimizers import (
    Best,
    checkpoint_blocks,
    divergence,
    last_losses,
    make_optimizer,
    set_rate,
)
from compressor.passes.train.recipe import Recipe, rate_factor
from compressor.passes.train.steps import Micro, Order, SavedState, Steps, as_tensors, read_steps
from compressor.types.tensors import Array, TensorSpec
from compressor.types.training import Advance, Training

if TYPE_CHECKING:
    from accelerate import Accelerator


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody wants the training to end."""

    def __init__(self) -> None:
        self.wanted = False

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Take a signal.

        Raises:
            KeyboardInterrupt: it is the second one: there is no time to save anything.
        """
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def deferred_interrupts() -> Iterator[Interruption]:
    """Yield what tells whether SIGINT or SIGTERM has come, which no longer end the process at once.

    Outside of the main thread nothing changes: only that one is told about signals.
    """
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {number: signal.signal(number, found.note) for number in _SIGNALS}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        tensors: parameters and buffers of the job's module, by its names, on the CPU.
        losses: of each step, over all processes.
        terms: the loss's terms at the last step.
        validations: step and value of each.
        best_step: after how many steps the tensors were had.
        started: the step that this process began with.
    """

    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]
    terms: Mapping[str, float]
    validations: tuple[tuple[int, float], ...]
    best_step: int
    started: int


def length(recipe: Recipe, order: Order) -> int:
    """Return how many steps a training has."""
    return recipe.steps or max(1, round(recipe.epochs * order.steps_in_epoch))


def make_order(
    recipe: Recipe, training: Training, inputs: Sequence[TensorSpec], seed: int
) -> Order:
    """Return which samples each step has.

    Args:
        recipe: options.
        training: data and processes.
        inputs: the model's, which may fix the batch.
        seed: the spec's.

    Raises:
        SpecError: the batch does not divide over the processes, or is not the model's.
        DataError: there are fewer samples than a batch.
    """
    batch, parts = recipe.batch or training.batch, training.ranks.size
    axis = inputs[0].shape[0] if inputs[0].shape else None
    fixed = axis if isinstance(axis, int) else None
    if batch % parts:
        raise SpecError(
            "batch",
            f"is {batch}, and {parts} processes share it",
            f"set a multiple of {parts}, such as batch: {-(-batch // parts) * parts}",
        )
    if fixed is not None and (recipe.micro_batch or batch // parts) != fixed:
        raise SpecError(
            "micro-batch",
            f"is {recipe.micro_batch or batch // parts}, and the model takes {fixed} at a time",
            f"set micro-batch: {fixed} and a batch that is a multiple of it",
        )
    order = Order(
        training.data.samples, batch, seed, recipe.validation, parts, whole=fixed is not None
    )
    if order.steps_in_epoch == 0:
        raise DataError(
            "training data",
            f"has {len(order.trained)} samples to train on, too few for a step of {batch}",
            f"set batch: {max(1, len(order.trained) // parts * parts)} or less, or give more data",
        )
    return order


def train(job: Job, recipe: Recipe, training: Training, order: Order) -> Trained:
    """Train a job's module in place.

    Raises:
        KeyboardInterrupt: somebody pressed Ctrl-C; the state has been saved.
        ModelError: the loss diverged.
        DataError: the data cannot be had, or do not fit the loss.
    """
    steps = length(recipe, order)
    accelerator = _accelerator(recipe.precision)
    loop = _Loop(job, recipe, training, order, accelerator, steps)
    with training.stage(job.name, steps) as advance, deferred_interrupts() as interruption:
        return loop.run(advance, interruption)


def _accelerator(precision: str) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    if precision == "float16" and not torch.cuda.is_available():
        raise SpecError(
            "precision", "is float16, which needs a GPU", "set bfloat16 or float32, or use a GPU"
        )
    # One process may train several times, each time with another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(
        mixed_precision=_PRECISION[precision],
        cpu=not torch.cuda.is_available(),
        step_scheduler_with_optimizer=False,
    )


class _Loop:
    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        training: Training,
        order: Order,
        accelerator: Accelerator,
        steps: int,
    ):
        self._job = job
        self._recipe = recipe
        self._training = training
        self._order = order
        self._accelerator = accelerator
        self._steps = steps
        self._warm_up = min(round(recipe.warm_up * steps), steps - 1)
        if recipe.checkpointing:
            checkpoint_blocks(job.module)
        optimizer = make_optimizer(job, recipe)
        self._model, self._optimizer = accelerator.prepare(job.module, optimizer)
        for regulator in job.regulators:
            accelerator.register_for_checkpointing(regulator)
        self._saved = SavedState(training.folder, accelerator, training.ranks)
        metric = training.metric
        self._judged = metric is not None and not metric.against_float
        higher = metric is not None and self._judged and metric.higher_is_better
        self._best = Best(higher)
        self._losses: list[float] = []
        self._terms: dict[str, float] = {}

    def run(self, advance: Advance, interruption: Interruption) -> Trained:
        start = self._resume()
        micro = self._recipe.micro_batch or self._order.batch
        rank = self._training.ranks.rank
        data = Steps(self._training.data, self._order, micro, rank)
        step = start
        for micros in read_steps(data, start, self._steps, self._recipe.workers):
            if self._stopped():
                break
            self._watch(step, self._step(step, micros, interruption))
            step += 1
            self._end_of_epoch(step)
            advance(step, self._shown())
            if interruption.wanted:
                self._save(step)
                raise KeyboardInterrupt
            if step % self._recipe.save_every == 0 and step < self._steps:
                self._save(step)
        return self._result(start, step)

    def _resume(self) -> int:
        progress = self._saved.restore()
        if progress is None:
            return 0
        self._losses = list(progress["losses"])
        self._terms = dict(progress["terms"])
        self._best.restore(progress["best"])
        return int(progress["step"])

    def _save(self, step: int) -> None:
        progress = {"losses": self._losses, "terms": self._terms, "best": self._best.as_json()}
        self._saved.save(step, progress)

    def _stopped(self) -> bool:
        patience = self._recipe.patience
        return patience is not None and self._best.since >= patience

    def _step(self, step: int, micros: tuple[Micro, ...], interruption: Interruption) -> float:
        """Move the weights once; return the loss over all processes."""
        rank = self._training.ranks.rank
        torch.manual_seed(_mixed(self._order.seed, step, rank))
        factor = rate_factor(step, self._steps, self._recipe.schedule, self._warm_up)
        set_rate(self._optimizer, self._recipe.learning_rate * factor)
        self._model.train()
        for regulator in self._job.regulators:
            regulator.before(step)
        samples = len(self._order.rows(step))
        totals: dict[str, Tensor] = {}
        for index, micro in enumerate(micros):
            with self._synchronized(index == len(micros) - 1):
                self._backward(micro, step, samples, totals)
        if self._recipe.clip is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), self._recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for regulator in self._job.regulators:
            regulator.after(step)
        return self._reduced(totals, samples, interruption)

    def _backward(self, micro: Micro, step: int, samples: int, totals: dict[str, Tensor]) -> None:
        outputs, moved = self._forward(micro)
        terms = self._job.objective.losses(outputs, moved, step)
        for name, each in terms.items():
            totals[name] = totals.get(name, torch.zeros(())) + each.detach().sum().cpu()
        # Processes' gradients are averaged, each of a part of the samples.
        loss = sum(each.sum() for each in terms.values()) / samples
        self._accelerator.backward(loss * self._training.ranks.size)

    def _forward(self, micro: Micro) -> tuple[dict[str, Tensor], Micro]:
        device = self._accelerator.device
        moved = Micro(micro.rows, {n: t.to(device) for n, t in micro.tensors.items()})
        inputs = {name: moved.tensors[name] for name in self._job.inputs}
        return self._model(**inputs), moved

    def _synchronized(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._accelerator.no_sync(self._model)

    def _reduced(
        self, totals: Mapping[str, Tensor], samples: int, interruption: Interruption
    ) -> float:
        """Average over processes, which also tell each other that somebody wants to end."""
        names = sorted(totals)
        values = [totals[n].double() for n in names]
        sums = torch.stack([*values, torch.tensor(float(interruption.wanted)).double()])
        if self._training.ranks.size > 1:
            sums = sum(self._training.ranks.gathered(sums), torch.zeros_like(sums))
        interruption.wanted = bool(sums[-1] > 0)
        self._terms = {n: float(v) / samples for n, v in zip(names, sums[:-1], strict=True)}
        return sum(self._terms.values())

    def _watch(self, step: int, loss: float) -> None:
        problem = divergence(loss, self._losses)
        if problem:
            kept = f"the best state so far, of step {self._best.step}, is kept"
            raise ModelError(
                f"pass {self._job.name!r}, step {step + 1} of {self._steps}",
                f"{problem}; the losses before: {last_losses(self._losses)}"
                + (f"; {kept}" if self._best.value is not None else ""),
                f"lower learning-rate ({self._recipe.learning_rate:g}), or set clip or warm-up",
            )
        self._losses.append(loss)

    def _end_of_epoch(self, step: int) -> None:
        whole = step % self._order.steps_in_epoch == 0 or step == self._steps
        if not whole or not len(self._order.validation):
            return
        if self._best.note(step, self._validated()):
            self._saved.save_best(self._tensors())

    @torch.no_grad()
    def _validated(self) -> float:
        """Return the metric, or where there is none the loss, on what was held out."""
        self._model.eval()
        ranks, size = self._training.ranks, self._recipe.micro_batch or self._order.batch
        own = self._order.validation[ranks.rank :: ranks.size]
        found: list[Array] = [np.zeros(0)]
        for start in range(0, len(own), size):
            rows = own[start : start + size]
            batch = self._training.data.batch(rows, (self._order.seed, 0, 0, start))
            micro = Micro(rows, as_tensors(batch, len(rows)))
            outputs, moved = self._forward(micro)
            found.append(self._values(outputs, moved))
        values = np.concatenate(ranks.gathered(np.concatenate(found)))
        metric = self._training.metric
        if metric is not None and self._judged:
            return float(metric.summary(values)["value"])
        return float(values.mean())

    def _values(self, outputs: Mapping[str, Tensor], micro: Micro) -> Array:
        metric, target = self._training.metric, self._training.data.target
        if metric is None or not self._judged or target is None:
            terms = self._job.objective.losses(outputs, micro, self._steps)
            return sum(
                (each.double().cpu().numpy() for each in terms.values()), np.zeros(len(micro.rows))
            )
        arrays = {name: outputs[name].float().cpu().numpy() for name in self._job.outputs}
        labels = micro.tensors[target].cpu().numpy()
        return metric.per_sample(arrays, labels, len(micro.rows))

    def _shown(self) -> str:
        text = f"loss {self._losses[-1]:.4g}"
        if self._best.history:
            metric = self._training.metric
            name = metric.name if metric is not None and self._judged else "validation loss"
            text += f"  {name} {self._best.history[-1][1]:.4g}"
        return text

    def _tensors(self) -> dict[str, Tensor]:
        state = self._accelerator.get_state_dict(self._model)
        return {name: tensor.detach().cpu() for name, tensor in state.items()}

    def _result(self, start: int, step: int) -> Trained:
        best = self._best.value is not None
        return Trained(
            tensors=self._saved.best() if best else self._tensors(),
            losses=tuple(self._losses),
            terms=dict(self._terms),
            validations=tuple(self._best.history),
            best_step=self._best.step if best else step,
            started=start,
        )


def _mixed(*parts: int) -> int:
    """Return one seed that depends on all parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
