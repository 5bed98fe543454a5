"""``archive``: the search for the smallest file, on a network that takes milliseconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.errors import ModelError, SpecError
from compressor.exporters import ArchiveExporter
from compressor.passes.train.archive.archive import Archive
from compressor.passes.train.archive.rounds import Round, Step, best, next_step
from compressor.run.metrics.metrics import Metric
from compressor.types.exporter import ExportContext
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array, Batch
from compressor.types.training import Training, TrainingStep
from tests.compressor.passes.train.small_qat import block
from tests.compressor.passes.train.small_training import SmallData, training

CONTEXT = PassContext(3, frozenset(), "accuracy")


class Search:
    """Images to choose on."""

    target: str | None = "label"

    def batches(self) -> Iterator[Batch]:
        """Yield them all, at once."""
        yield SmallData(200, noisy=False).batch(np.arange(200), ())


def closeness(outputs: Batch, target: Any) -> Array:
    """Return how near the outputs are to the float network's."""
    del target
    images = {"x": SmallData(200, noisy=False).images}
    (theirs,) = block().runner().run(images).values()
    (ours,) = outputs.values()
    return -np.abs(ours - theirs).sum(1)


def given(folder: Path, **changes: Any) -> Training:
    """Return what a run would hand to the pass."""
    return replace(training(folder, block()), **{"search": Search(), **changes})


def searched(folder: Path, given_training: Training | None = None, **options: Any) -> Outcome:
    """Search in two short rounds."""
    length = {} if "steps" in options else {"epochs": 1}
    declared = Archive.model_validate(
        {"rounds": 2, **length, "max_metric_drop": 100.0, "bits": 3, **options}
    )
    declared.survey(block(), CONTEXT)
    return declared.apply_training(block(), CONTEXT, {}, given_training or given(folder))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return searched(tmp_path_factory.mktemp("search"))


def test_weights_are_codes_and_vectors_are_short(outcome: Outcome) -> None:
    assert all(layer.scheme.startswith("cluster") for layer in outcome.layers)
    for layer in outcome.carrier.layers():
        assert outcome.carrier.weight(layer).unique().numel() <= 8
    tensors = {n: t.read() for n, t in outcome.carrier.tensors().items() if n != "variance_8"}
    biases = [t for t in tensors.values() if t.ndim == 1 and t.is_floating_point()]
    assert len(biases) >= 3
    for bias in biases:
        assert bias.unique().numel() <= 8
        mantissa, _ = torch.frexp(bias.double())
        assert torch.equal(mantissa * 32, (mantissa * 32).round())
    assert sum(layer.details["zeros"] > 0 for layer in outcome.layers) >= 2


def test_an_archive_of_it_is_small_and_computes_the_same(outcome: Outcome, tmp_path: Path) -> None:
    exporter = ArchiveExporter()
    (path,) = exporter.write(outcome.carrier, tmp_path, ExportContext("small", "0" * 64))
    batch = {"x": SmallData(16, noisy=False).images}
    ours = next(iter(exporter.open(path).run(batch).values()))
    theirs = next(iter(outcome.carrier.runner().run(batch).values()))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_search_goes_on_where_it_was(outcome: Outcome, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def note(text: str) -> None:
        if text.startswith("round 1"):
            raise StoppedError

    with pytest.raises(StoppedError):
        searched(tmp_path, given(tmp_path, note=note))
    first = tmp_path / "state" / "round-00" / "done"
    before = {p.name: p.read_bytes() for p in first.iterdir()}
    again = searched(tmp_path)
    assert before == {p.name: p.read_bytes() for p in first.iterdir()}
    for name, stored in outcome.carrier.tensors().items():
        assert torch.equal(stored.read(), again.carrier.tensors()[name].read())


@pytest.mark.slow
def test_a_round_goes_on_at_the_step_where_it_was(tmp_path: Path) -> None:
    """Price, what errors cost, values, codes and the optimizer are as they were."""

    class KilledError(Exception):
        pass

    steps = []

    def killed(done: TrainingStep) -> None:
        if done.name.endswith("round 2"):
            steps.append(done.step)
            if done.step == 25:
                raise KilledError

    whole = searched(tmp_path, given(tmp_path / "whole"), steps=60)
    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        searched(tmp_path, given(folder, callbacks=(killed,)), steps=60, save_every=4)
    before = len(steps)
    again = given(folder, callbacks=(lambda done: steps.append(done.step),))
    found = searched(tmp_path, again, steps=60, save_every=4)
    assert steps[before] == 25, "it goes on after the state that was saved"
    for name, stored in whole.carrier.tensors().items():
        assert torch.equal(stored.read(), found.carrier.tensors()[name].read())


def test_a_damaged_round_is_done_again(outcome: Outcome, tmp_path: Path) -> None:
    notes: list[str] = []
    searched(tmp_path)
    shutil.rmtree(tmp_path / "state" / "round-01")
    damaged = tmp_path / "state" / "round-00" / "done" / "round.json"
    damaged.write_text("{}")
    again = searched(tmp_path, given(tmp_path, note=notes.append))
    assert "round 1 of the search is damaged" in notes[0]
    assert again.notes == outcome.notes


def test_no_round_keeps_the_limit(tmp_path: Path) -> None:
    strict = given(tmp_path, metric=Metric("closeness", closeness))
    with pytest.raises(ModelError, match="found no archive that loses at most 0: of 1 rounds"):
        searched(tmp_path, strict, rounds=1, max_metric_drop=0.0)


def test_plan_errors() -> None:
    with pytest.raises(ValueError, match="prune is not for this pass"):
        Archive.model_validate({"prune": {"target": 0.5}})
    with pytest.raises(SpecError, match="judges rounds by the metric, but there is none"):
        Archive().survey(block(), PassContext())


def done(nbytes: float, drop: float, error: float = 0.1, start: int = -1) -> Round:
    return Round(nbytes, nbytes, drop, error, 1e-5, start)


def test_rounds_halve_the_bytes_and_then_take_less_and_longer() -> None:
    first = next_step([], 0.0, 3200.0, 9)
    assert first == Step(-1, 100.0)
    rounds = [done(100.0, -0.1)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 50.0)
    rounds += [done(50.0, -0.2)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 25.0)
    rounds += [done(25.0, 0.3)]
    step = next_step(rounds, 0.0, 3200.0, 9)
    assert step is not None
    assert (step.start, step.target, step.length) == (-1, pytest.approx(50 * 0.5**0.5), 2)
    rounds += [done(35.0, -0.3)]
    step = next_step(rounds, 0.0, 3200.0, 9)
    assert step is not None  # as few bytes as before, but for longer
    assert (step.start, step.target, step.length) == (-1, pytest.approx(35 * 0.5**0.5), 2)
    rounds += [done(25.0, 0.5), done(30.0, 0.5)]
    step = next_step(rounds, 0.0, 3200.0, 9)
    assert step is not None
    assert (step.start, step.target, step.length) == (-1, pytest.approx(35 * 0.5**0.125), 8)
    assert next_step(rounds, 0.0, 3200.0, 6) is None
    rounds += [done(32.0, 0.5)]
    assert next_step(rounds, 0.0, 3200.0, 9) is None, "it would take away less than 7 %"
    assert best(rounds, 0.0) == 3


def test_if_the_first_bytes_are_too_few_there_are_more() -> None:
    rounds = [done(100.0, 2.0)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 200.0, 2)
    rounds += [done(200.0, -0.3)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 100.0, 2)
    assert next_step([done(100.0, 2.0)] * 5, 0.0, 3200.0, 9) is None


def test_a_round_that_may_be_good_enough_is_trained_on_once() -> None:
    rounds = [done(100.0, 0.05)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(0, 100.0, 2)
    rounds += [done(100.0, 0.0, start=0)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 200.0, 4)
    rounds += [done(200.0, 2.0)] * 3
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 1600.0, 16), "no longer than that"
    rounds[-1] = done(200.0, -0.4)
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(-1, 100.0, 16)
    rounds = [done(100.0, -0.4), done(50.0, 0.05)]
    assert next_step(rounds, 0.0, 3200.0, 9) == Step(1, 50.0, 2)
    better = [*rounds, done(49.0, -0.4, start=1)]
    assert next_step(better, 0.0, 3200.0, 9) == Step(-1, 24.5, 2)
    worse = next_step([*rounds, done(50.0, 0.05, start=1)], 0.0, 3200.0, 9)
    assert worse == Step(-1, pytest.approx(100 * 0.5**0.5), 4)


@pytest.mark.parametrize(
    ("drop", "limit", "tries", "verdict"),
    [
        (-0.07, 0.0, 1, "kept"),
        (-0.065, 0.0, 1, "open"),
        (-0.07, 0.0, 2, "open"),
        (-0.12, 0.0, 2, "kept"),
        (0.16, 0.0, 1, "open"),
        (0.17, 0.0, 1, "lost"),
        (0.93, 1.0, 1, "kept"),
        (1.17, 1.0, 1, "lost"),
    ],
)
def test_verdicts(drop: float, limit: float, tries: int, verdict: str) -> None:
    assert done(1.0, drop).verdict(limit, tries) == verdict


def test_kept_rounds_show_no_loss_on_other_samples() -> None:
    """The best of many rounds of equal worth is chosen, and tested on samples of its own."""
    draw, failures, chosen = np.random.default_rng(5), 0, 0
    for _ in range(6000):
        true = draw.uniform(-0.1, 0.3)
        rounds = [done(100.0 - n, true + 0.1 * draw.normal()) for n in range(5)]
        number = best(rounds, 0.0)
        if number >= 0:
            chosen += 1
            failures += true + 0.1 * draw.normal() > 0.1645
    assert chosen > 1000
    assert failures <= 0.05 * chosen


def test_the_smallest_kept_round_is_the_result() -> None:
    rounds = [done(90.0, -0.1), done(50.0, 0.5), done(60.0, -0.3)]
    assert best(rounds, 0.0) == 2
    assert best(rounds, 0.6) == 1
    assert best(rounds[1:2], 0.0) == -1
    # What is kept on a first try is not after one that was near; one that was lost takes no try.
    assert best([done(90.0, -0.065), done(80.0, -0.07)], 0.0) == -1
    assert best([done(90.0, 0.17), done(80.0, -0.07)], 0.0) == 1
