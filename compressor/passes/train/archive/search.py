"""The search of ``archive``: each round in the store, so that a killed search goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.errors import DataError
from compressor.files import json_text
from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.archive.code_assignment import CodeAssignment
from compressor.passes.train.archive.coded_network import (
    CodedNetwork,
    coded_network,
    float_network,
)
from compressor.passes.train.archive.coding import first_coding, price_for, relaxed
from compressor.passes.train.archive.first_step import gentle_rate
from compressor.passes.train.archive.rounds import Round, Step, next_step, verdicts
from compressor.passes.train.archive.sensitivity import Sensitivities
from compressor.passes.train.distill.distilling import distilled_loss
from compressor.passes.train.engine import train
from compressor.passes.train.job import Job, Micro, ParameterGroup, as_tensors
from compressor.passes.train.kept_parts import kept_part, part_folder
from compressor.passes.train.recipe import Course
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer
from compressor.types.passes import PassContext
from compressor.types.tensors import Array, answers, samples_in
from compressor.types.training import Training

if TYPE_CHECKING:
    from compressor.passes.train.archive.archive import Archive

_FELT = 8  # samples whose gradient is taken together where errors are priced
_PRICED = 128  # such gradients
_TRIED = 8  # times as many samples on which a learning rate is tried
_AT_ONCE = 0.7  # of the bytes: what is left of a network that has not been coded before
_WIDTH = 2 * NormalDist().inv_cdf(0.975)  # standard errors in a 95 % interval
_BOOK_RATE = 0.3  # of the learning rate: a value moves with all weights that take it
_TENSORS, _ROUND = "model.safetensors", "round.json"
_APART = 1_000_003  # between the seeds of rounds


class Search:
    """Rounds of coding, training and judging.

    Args:
        options: of the pass.
        carrier: the model that the pass is given: what rounds are compared with.
        inner: the fused graph.
        layers: those that are coded, by the name of the weight.
        teacher: what is learned from.
    """

    def __init__(
        self,
        options: Archive,
        carrier: Carrier,
        inner: Carrier,
        layers: Mapping[str, Layer],
        teacher: Carrier,
        context: PassContext,
        course: Course,
    ):
        self._options, self._carrier, self._inner = options, carrier, inner
        self._teacher, self._context, self._course = teacher, context, course
        source = carrier.trainable()
        assert isinstance(source, NamedModule)
        graph = inner.graph()
        self._source = source
        self._network = coded_network(graph, layers, source, options.bits, options.float_bits)
        self._start = self._network.state()
        self._floats = 4.0 * sum(layer.parameters for layer in layers.values())
        self._reference: Array | None = None

    def run(self) -> tuple[Round, ...]:
        """Do all rounds; those that an earlier run finished are read.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`.
        """
        rounds: list[Round] = []
        options = self._options
        while step := next_step(rounds, options.max_metric_drop, self._floats, options.rounds):
            rounds.append(self._round(len(rounds), step))
            words = _words(rounds, len(rounds) - 1, options.max_metric_drop)
            self._course.training.note(words)
        return tuple(rounds)

    @cached_property
    def rate(self) -> tuple[float, float]:
        """The learning rate, and what a first step at the largest one would take."""
        module = float_network(self._inner.graph(), self._network.trained, self._source)
        micros = [_few(self._course, step) for step in range(_TRIED)]
        return gentle_rate(module, micros, self._options.learning_rate)

    def network(self, number: int) -> CodedNetwork:
        """Return the network as a round left it."""
        self._network.load(self._left_by(number))
        return self._network

    def _left_by(self, number: int) -> Mapping[str, Tensor]:
        if number < 0:
            return self._start
        return load_file(part_folder(self._course.training, _name(number)) / _TENSORS)

    def _round(self, number: int, step: Step) -> Round:
        """Do a round, or read one that an earlier run has finished."""
        kept_part(
            self._course.training,
            _name(number),
            f"round {number + 1} of the search",
            partial(self._done, number, step),
            self._write,
        )
        return self._read(number)

    def _read(self, number: int) -> Round:
        """Return a round that is done."""
        path = part_folder(self._course.training, _name(number)) / _ROUND
        return Round(**json.loads(path.read_text(encoding="utf-8")))

    def _write(self, result: Round, folder: Path) -> None:
        save_file(self._network.state(), folder / _TENSORS)
        (folder / _ROUND).write_text(json_text(asdict(result)), encoding="utf-8")

    def _done(self, number: int, step: Step, training: Training) -> Round:
        """Code at a price, train and judge."""
        network, base, options = self._network, self._course, self._options
        network.load(self._left_by(step.start))
        if step.start >= 0:
            network.settle()
        order = replace(base.order, seed=base.order.seed + _APART * (number + 1))
        recipe = base.recipe.model_copy(
            update={
                "epochs": options.epochs * step.length,
                "steps": None if options.steps is None else options.steps * step.length,
                "learning_rate": self.rate[0],
            }
        )
        course = replace(base, recipe=recipe, order=order, training=training)
        loss = distilled_loss(
            options.distill, self._teacher, self._inner, network.module, course, self._context
        )
        sensitivities, few = Sensitivities(network), partial(_few, course)
        network.decoder.share = 1.0
        with base.training.stage(f"round {number + 1}: price of errors", _PRICED) as advance:
            sensitivities.measure(map(few, range(_PRICED)), advance)
        if step.start < 0:
            codings = {
                name: replace(
                    first_coding(coding.weights, options.bits), sensitivity=coding.sensitivity
                )
                for name, coding in network.codings(sensitivities.of).items()
            }
            begin = sum(coding.nbytes for coding in codings.values())
            price = price_for(codings, max(_AT_ONCE * begin, step.target))
            network.code({name: relaxed(coding, price) for name, coding in codings.items()})
        else:
            price = self._read(step.start).price
        assignment = CodeAssignment(network, sensitivities, few, price, step.target, course.steps)
        job = Job(
            name=f"{options.name}, round {number + 1}",
            module=network.module,
            objective=loss,
            inputs=network.module.inputs,
            outputs=network.module.outputs,
            regulators=(assignment,),
            groups=(ParameterGroup(network.books, _BOOK_RATE),),
        )
        trained = train(job, course)
        network.load(trained.tensors)
        network.shorten()
        drop, error = self._judged()
        return Round(step.target, network.nbytes(), drop, error, assignment.price, step.start)

    def _judged(self) -> tuple[float, float]:
        """Return the drop on the search data, and its standard error."""
        metric = self._course.training.metric
        assert metric is not None
        if self._reference is None:
            self._reference = self._values(self._carrier)
        written = self._network.written(self._inner)
        found = metric.difference(self._reference, self._values(written))
        low, high = found["ci95"]
        return float(found["drop"]), (float(high) - float(low)) / _WIDTH

    def _values(self, carrier: Carrier) -> Array:
        """Return the metric's value for each sample of the search data, as a runtime computes."""
        training, runner = self._course.training, carrier.runner()
        metric, search = training.metric, training.search
        assert metric is not None
        assert search is not None
        names = [spec.name for spec in carrier.inputs]
        parts = []
        for batch in search.batches():
            outputs = runner.run({name: batch[name] for name in names})
            target = None if search.target is None else answers(batch, search.target)
            parts.append(metric.per_sample(outputs, target, samples_in(batch)))
        if not parts:
            raise DataError("data.search", "has no samples", "check the source")
        return np.concatenate(parts)


def _name(number: int) -> str:
    """Return the name of a round's folder."""
    return f"round-{number:02d}"


def _few(course: Course, step: int) -> Micro:
    """Return a few of a step's samples; every process measures on the same."""
    order = course.order
    rows = order.rows(step)[:_FELT]
    batch = course.training.data.batch(rows, (order.seed, step, 0))
    return Micro(rows, as_tensors(batch, len(rows)))


_SAID = {"kept": "kept", "open": "not sure", "lost": "too much"}


def _words(rounds: Sequence[Round], number: int, limit: float) -> str:
    one, verdict = rounds[number], verdicts(rounds, limit)[number]
    return (
        f"round {number + 1}: {one.nbytes:,.0f} bytes of weights, drop {one.drop:.2f} "
        f"± {one.error:.2f}: {_SAID[verdict]}"
    )


def summary(rounds: Sequence[Round], limit: float, chosen: int) -> tuple[str, ...]:
    """Return how the search went, one sentence each."""
    return tuple(
        _words(rounds, n, limit) + (", the result" if n == chosen else "")
        for n in range(len(rounds))
    )
