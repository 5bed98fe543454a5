"""The training loop and its optimizer: resumed, watched, and ended cleanly by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.errors import ModelError, SpecError
from compressor.passes.train.accelerators import accelerated
from compressor.passes.train.altered_modules import checkpoint_blocks, synchronize_norms
from compressor.passes.train.averages import Average
from compressor.passes.train.job import (
    Job,
    Micro,
    Objective,
    ParameterGroup,
    Steps,
    Trained,
    as_tensors,
    read_steps,
)
from compressor.passes.train.logs import TrainingLog
from compressor.passes.train.master_weights import step_in_float32
from compressor.passes.train.rates import rate_factor
from compressor.passes.train.recipe import Course, Recipe
from compressor.passes.train.saved_state import Prepared, SavedState
from compressor.passes.train.watch import (
    Best,
    Interruption,
    deferred_interrupts,
    divergence,
    last_losses,
)
from compressor.run.metrics.judged import judged_outputs
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, answers
from compressor.types.training import Advance, Handed, TrainingStep

if TYPE_CHECKING:
    from accelerate import Accelerator

_FACTOR = "rate_factor"


def train_model(
    course: Course, carrier: Carrier, module: nn.Module, objective: Objective
) -> Trained:
    """Train all of a model's module in place; see :func:`train`."""
    job = Job(
        name=course.recipe.name,
        module=module,
        objective=objective,
        inputs=tuple(spec.name for spec in carrier.inputs),
        outputs=tuple(spec.name for spec in carrier.outputs),
        regulators=course.recipe.regulators(carrier, module, course.steps),
    )
    return train(job, course)


def train(job: Job, course: Course) -> Trained:
    """Train a job's module in place.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; the state has been saved.
        ModelError: the loss diverged.
        DataError: the data cannot be read, or do not fit the loss.
    """
    if course.training.loop is not None:
        tensors = course.training.loop.train(_handed(job, course))
        return Trained(tensors, (), {}, (), best_step=0, started=0)
    with (
        accelerated(course.recipe.precision, course.training.ranks) as accelerator,
        course.training.stage(job.name, course.steps) as advance,
        deferred_interrupts() as interruption,
    ):
        trained = _Loop(job, course, accelerator).run(advance, interruption)
    if interruption.wanted:  # since the last step, after which nobody has asked
        raise KeyboardInterrupt
    return trained


def _handed(job: Job, course: Course) -> Handed:
    """Return the job for a program that trains it in its own loop.

    Raises:
        SpecError: what is done depends on the number of steps, which is not given.
    """
    if course.recipe.scheduled and course.recipe.steps is None:
        raise SpecError(
            f"pass {job.name!r}",
            "changes during the training, and the number of steps of your loop is not set",
            "set steps, such as steps: 1000",
        )
    return job.handed(course.training.data.target, course.steps)


class _Loop:
    def __init__(self, job: Job, course: Course, accelerator: Accelerator):
        self._job, self._course = job, course
        self._recipe, self._training = recipe, training = course.recipe, course.training
        self._order, self._steps, self._micro = course.order, course.steps, course.micro
        self._accelerator = accelerator
        self._parts, self._prunings = course.parts, course.prunings
        rewound = (
            recipe.prune is not None and (recipe.prune.rewind, recipe.prune.rounds) != (None,) * 2
        )
        self._rewinds = self._prunings if rewound else ()
        length = self._parts.length
        self._warm_up = min(round(recipe.warm_up * length), length - 1)
        if recipe.checkpointing:
            checkpoint_blocks(job.module)
        if recipe.sync_batch_norm and training.ranks.size > 1:
            synchronize_norms(job.module)
        optimizer = make_optimizer(job, recipe)
        self._model, self._optimizer = accelerator.prepare(job.module, optimizer)
        self._prepared = Prepared(accelerator, self._model, self._optimizer)
        self._average = None if recipe.ema is None else self._averaged(recipe.ema)
        # The average comes last: it is of what the others have left.
        own = () if self._average is None else (self._average,)
        self._regulators = regulators = (*job.regulators, *own)
        self._saved = SavedState(
            training.folder, self._prepared, regulators, training.ranks, training.note
        )
        # Without a metric against labels, held-out data are judged by the loss.
        metric = training.metric
        self._metric = None if metric is None or metric.against_float else metric
        self._best = Best(self._metric is not None and self._metric.higher_is_better)
        self._losses: list[float] = []
        self._terms: dict[str, float] = {}

    def run(self, advance: Advance, interruption: Interruption) -> Trained:
        start = self._resume()
        recipe, training, order = self._recipe, self._training, self._order
        course = self._course
        data = Steps(training.data, order, self._micro, training.ranks.rank, course.mixup)
        first = training.ranks.rank == 0
        label = training.label or recipe.name
        log = TrainingLog(recipe.log, training.base, start, label) if recipe.log and first else None
        watching = (*(training.callbacks if first else ()), *((log,) if log else ()))
        with log or nullcontext():
            return self._run(data, start, advance, interruption, watching)

    def _run(
        self,
        data: Steps,
        start: int,
        advance: Advance,
        interruption: Interruption,
        watching: Sequence[Callable[[TrainingStep], None]],
    ) -> Trained:
        recipe, step = self._recipe, start
        for micros in read_steps(data, start, self._steps, recipe.workers):
            if recipe.patience is not None and self._best.since >= recipe.patience:
                break
            self._watch(step, self._step(step, micros, interruption))
            step += 1
            self._end_of_epoch(step)
            for watcher in watching:
                watcher(self._record(step))
            advance(step, self._shown())
            if interruption.wanted:
                self._save(step)
                raise KeyboardInterrupt
            if step % recipe.save_every == 0 and step < self._steps:
                self._save(step)
        return self._result(start, step)

    def _resume(self) -> int:
        progress = self._saved.restore()
        if progress is None:
            return 0
        self._losses = list(progress["losses"])
        self._terms = dict(progress["terms"])
        self._best.history = [(step, value) for step, value in progress["validations"]]
        return int(progress["step"])

    def _save(self, step: int) -> None:
        validations = self._best.history
        progress = {"losses": self._losses, "terms": self._terms, "validations": validations}
        self._saved.save(step, progress)

    def _step(self, step: int, micros: tuple[Micro, ...], interruption: Interruption) -> float:
        """Move the weights once; return the loss over all processes."""
        seeds = np.random.SeedSequence((self._order.seed, step, self._training.ranks.rank))
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        place, length = self._parts.place(step)
        recipe = self._recipe
        factor = rate_factor(place, length, recipe.schedule, self._warm_up, recipe.milestones)
        self._rate = self._recipe.learning_rate * factor
        set_rate(self._optimizer, self._rate)
        self._model.train()
        for regulator in self._regulators:
            regulator.before(step)
        samples = len(self._order.rows(step))
        totals: dict[str, Tensor] = {}
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                outputs, moved = self._forward(micro)
                terms = self._job.objective.losses(outputs, moved, step)
                for name, each in terms.items():
                    totals[name] = totals.get(name, torch.zeros(())) + each.detach().sum().cpu()
                # Processes' gradients are averaged, each of a part of the samples.
                loss = sum(each.sum() for each in terms.values()) / samples
                self._accelerator.backward(loss * self._training.ranks.size)
        if self._recipe.clip is not None:
            self._accelerator.clip_grad_norm_(self._model.parameters(), self._recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for regulator in self._regulators:
            regulator.after(step)
        if step in self._rewinds:  # moments of where the weights were lead away from here
            self._optimizer.state.clear()
            if self._average is not None:
                self._average.restart(step)
        return self._reduced(totals, samples, interruption)

    def _forward(self, micro: Micro) -> tuple[dict[str, Tensor], Micro]:
        moved = micro.to(self._accelerator.device)
        inputs = {name: moved.tensors[name] for name in self._job.inputs}
        return self._model(**inputs), moved

    def _reduced(
        self, totals: Mapping[str, Tensor], samples: int, interruption: Interruption
    ) -> float:
        """Return the mean loss over all processes, which also learn of an interruption in any."""
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
            problem += f"; the losses before: {last_losses(self._losses)}"
            if self._best.history:
                problem += f"; the best state so far, of step {self._best.step}, is kept"
            raise ModelError(
                f"pass {self._job.name!r}, step {step + 1} of {self._steps}",
                problem,
                f"lower learning-rate ({self._recipe.learning_rate:g}), or set clip or warm-up",
            )
        self._losses.append(loss)

    def _end_of_epoch(self, step: int) -> None:
        whole = step % self._order.steps_in_epoch == 0 or step == self._steps
        if not whole or not len(self._order.validation):
            return
        if self._prunings and step <= self._prunings[-1]:
            return  # a network that is yet to lose weights is no candidate
        with nullcontext() if self._average is None else self._average.applied():
            self._best.history.append((step, self._validated()))
        if self._best.step == step:
            self._saved.save_best(step, self._weights())

    def _averaged(self, decay: float) -> Average:
        """Return an average of the weights.

        Raises:
            SpecError: each process holds a part of them.
        """
        if self._prepared.spread:
            raise SpecError("ema", "does not work with FSDP", "leave ema out, or train without it")
        return Average(self._accelerator.unwrap_model(self._model), decay)

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights trained so far: their average, if one is kept."""
        return self._prepared.weights() if self._average is None else self._average.weights()

    def _record(self, step: int) -> TrainingStep:
        history = self._best.history
        validation = history[-1][1] if history and history[-1][0] == step else None
        name, loss = self._job.name, self._losses[-1]
        return TrainingStep(name, step, self._steps, loss, self._terms, self._rate, validation)

    @torch.no_grad()
    def _validated(self) -> float:
        """Return the metric, or if there is none the loss, on the held-out samples."""
        self._model.eval()
        ranks, size = self._training.ranks, self._micro
        share = self._order.validation[ranks.rank :: ranks.size]
        parts: list[Array] = []
        for index, (rows, count) in enumerate(self._order.blocks(share, size)):
            batch = self._training.data.batch(rows, (self._order.seed, 0, 0, index * size))
            micro = Micro(rows, as_tensors(batch, len(rows)))
            outputs, moved = self._forward(micro)
            parts.append(self._values(outputs, moved)[:count])
        gathered = [part for share in ranks.gathered(parts) for part in share]
        values = np.concatenate(gathered) if gathered else np.zeros(0)
        return float(
            values.mean() if self._metric is None else self._metric.summary(values)["value"]
        )

    def _values(self, outputs: Mapping[str, Tensor], micro: Micro) -> Array:
        target = self._training.data.target
        if self._metric is None or target is None:
            terms = self._job.objective.losses(outputs, micro, self._steps)
            return sum(
                (each.double().cpu().numpy() for each in terms.values()), np.zeros(len(micro.rows))
            )
        arrays = {name: outputs[name].float().cpu().numpy() for name in self._job.outputs}
        given = {n: t.cpu() for n, t in micro.tensors.items()}
        batch = {n: (t.float() if t.is_floating_point() else t).numpy() for n, t in given.items()}
        judged = judged_outputs(batch, arrays, self._metric)
        right = answers(given, target)
        labels = (
            {n: t.numpy() for n, t in right.items()} if isinstance(right, dict) else right.numpy()
        )
        return self._metric.per_sample(judged, labels, len(micro.rows))

    def _shown(self) -> str:
        text = f"loss {self._losses[-1]:.4g}"
        if self._best.history:
            name = "validation loss" if self._metric is None else self._metric.name
            text += f"  {name} {self._best.history[-1][1]:.4g}"
        return text

    def _result(self, start: int, step: int) -> Trained:
        best = bool(self._best.history)
        tensors = self._saved.best() if best else self._weights()
        if not self._prepared.spread:
            self._job.module.cpu()  # where it was
        return Trained(
            tensors=tensors,
            losses=tuple(self._losses),
            terms=dict(self._terms),
            validations=tuple(self._best.history),
            best_step=self._best.step if best else step,
            started=start,
        )


def make_optimizer(job: Job, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a job's parameters that are trained.

    Weight decay acts on parameters with two axes or more: I. Loshchilov and F. Hutter, Decoupled
    weight decay regularization, 2019 (arXiv:1711.05101), for AdamW.
    """
    trained = {n: p for n, p in job.module.named_parameters() if p.requires_grad}
    grouped = frozenset[str]().union(*(group.names for group in job.groups))
    matrices = frozenset(n for n, p in trained.items() if p.ndim > 1) - grouped
    vectors = frozenset(trained) - matrices - grouped
    groups: list[dict[str, Any]] = [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if group.decay else 0.0,
            _FACTOR: group.rate,
        }
        for group in (ParameterGroup(matrices, decay=True), ParameterGroup(vectors), *job.groups)
        if (parameters := [p for n, p in trained.items() if n in group.names])
    ]
    rate = recipe.learning_rate
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=rate)
        if recipe.optimizer == "adamw"
        else torch.optim.SGD(groups, lr=rate, momentum=recipe.momentum)
    )
    step_in_float32(optimizer)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, each with its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_FACTOR]
