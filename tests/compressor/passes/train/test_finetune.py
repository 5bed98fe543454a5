"""Training by ``finetune``: what is saved, resumed, stopped and refused."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.errors import CompressorError, DataError, ModelError, SpecError
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.finetune import Finetune
from compressor.passes.train.pruning import Gradual
from compressor.types.passes import Outcome, PassContext
from compressor.types.training import Advance
from tests.compressor.passes.train.small_training import SmallData, small, training

CONTEXT = PassContext(seed=3, metric="accuracy")


def tuned(folder: Path, carrier: TorchCarrier | None = None, **options: Any) -> Outcome:
    """Train the small network."""
    start = carrier or small()
    own = {k: options.pop(k) for k in ("data", "metric", "stage", "note") if k in options}
    chosen = Finetune.model_validate({"steps": 12, "learning_rate": 0.05, **options})
    return chosen.apply_training(start, CONTEXT, {}, training(folder, start, **own))


def state(outcome: Outcome) -> dict[str, torch.Tensor]:
    assert isinstance(outcome.carrier, TorchCarrier)
    return dict(outcome.carrier.module.state_dict())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


class Killed(BaseException):
    """Ends a training as a signal that cannot be caught would."""


def ending_at(step: int, how: str) -> Any:
    """Return a stage that ends the training once a step is done."""

    @contextmanager
    def stage(description: str, total: int) -> Iterator[Advance]:
        del description, total

        def advance(done: int, text: str = "") -> None:
            del text
            if done == step and how == "killed":
                raise Killed
            if done == step:
                os.kill(os.getpid(), signal.SIGINT)

        yield advance

    return stage


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_an_interrupted_training_ends_in_the_same_bytes(
    tmp_path: Path, how: str, optimizer: str
) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "save_every": 3, "validation": 0.2}
    whole = tuned(tmp_path / "whole", **options)
    folder = tmp_path / "broken"
    with pytest.raises(Killed if how == "killed" else KeyboardInterrupt):
        tuned(folder, **options, stage=ending_at(8, how))
    resumed = tuned(folder, **options)
    saved = 6 if how == "killed" else 8  # the last state before; at Ctrl-C that of the very step
    assert f"resumed from the state saved after step {saved}" in resumed.notes
    assert same(state(resumed), state(whole))


def test_training_makes_the_loss_smaller(tmp_path: Path) -> None:
    before = small()
    outcome = tuned(tmp_path, before, steps=40)
    first, last = (float(part) for part in outcome.notes[0].split()[1:4:2])
    assert last < 0.6 * first
    assert not same(state(outcome), dict(before.module.state_dict()))
    assert same(dict(before.module.state_dict()), dict(small().module.state_dict()))


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_gradients_of_parts_add_up_to_those_of_the_whole(tmp_path: Path, micro: int) -> None:
    carrier = small(dropout=0.0, norm=False)  # batch norm sees the parts, not the whole
    options: dict[str, Any] = {"optimizer": "sgd", "data": SmallData(30, noisy=False)}
    whole = tuned(tmp_path / "whole", carrier, **options)
    parts = tuned(tmp_path / "parts", carrier, micro_batch=micro, **options)
    for name, value in state(whole).items():
        torch.testing.assert_close(state(parts)[name], value, rtol=1e-5, atol=1e-6)


def test_products_in_16_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 30, "data": SmallData(40, noisy=False)}
    wide = tuned(tmp_path / "wide", **options)
    narrow = tuned(tmp_path / "narrow", precision="bfloat16", **options)
    assert all(t.dtype in (torch.float32, torch.int64) for t in state(narrow).values())
    assert not same(state(narrow), state(wide))
    first, last = (float(part) for part in narrow.notes[0].split()[1:4:2])
    assert last < 0.8 * first


def test_skipped_layers_stay(tmp_path: Path) -> None:
    before = small()
    outcome = tuned(tmp_path, before, layers=({"match": "fc", "skip": True},))
    after = state(outcome)
    for name, value in before.module.state_dict().items():
        if name != "bn.num_batches_tracked":
            assert torch.equal(after[name], value) == name.startswith("fc."), name
    assert [layer.name for layer in outcome.layers] == ["conv"]


def test_zeros_stay_zero_in_every_layer(tmp_path: Path) -> None:
    before = small()
    names = ("conv.weight", "fc.weight")
    weights = {name: before.module.state_dict()[name].clone() for name in names}
    for weight in weights.values():
        weight[::2] = 0
    after = state(tuned(tmp_path, before.with_weights(weights), weight_decay=0.1))
    for name, weight in weights.items():
        assert not after[name][::2].any(), name
        assert bool((after[name][1::2] != weight[1::2]).all()), name


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("rewind", [None, 2])
def test_weights_go_gradually(tmp_path: Path, scope: str, rewind: int | None) -> None:
    prune = {"target": 0.5, "scope": scope, "every": 2, "rewind": rewind}
    outcome = tuned(tmp_path, prune=prune)
    weights = {n: t for n, t in state(outcome).items() if t.ndim > 1}
    zeros = {name: int((t == 0).sum()) for name, t in weights.items()}
    assert sum(zeros.values()) == sum(t.numel() for t in weights.values()) // 2
    if scope == "local":
        assert all(zeros[name] == t.numel() // 2 for name, t in weights.items())


def test_pruned_weights_go_back_to_early_values(tmp_path: Path) -> None:
    prune = {"target": 0.5, "end": 1.0, "rewind": 0}
    before = dict(small().module.state_dict())
    after = state(tuned(tmp_path, prune=prune))
    for name in ("conv.weight", "fc.weight"):
        alive = after[name] != 0
        assert torch.equal(after[name][alive], before[name][alive])


def test_gradual_pruning_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "prune": {"target": 0.5, "every": 2, "rewind": 1},
        "save_every": 1,
    }
    whole = tuned(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        tuned(tmp_path / "broken", **options, stage=ending_at(5, "killed"))
    assert same(state(tuned(tmp_path / "broken", **options)), state(whole))


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("rewind", [None, 1])
def test_rounds_prune_the_same_share_of_what_is_left(
    tmp_path: Path, scope: str, rewind: int | None
) -> None:
    prune = {"target": 0.75, "rounds": 2, "scope": scope, "rewind": rewind}
    weights = {n: t for n, t in state(tuned(tmp_path, prune=prune)).items() if t.ndim > 1}
    zeros = sum(int((t == 0).sum()) for t in weights.values())
    assert zeros == round(0.75 * sum(t.numel() for t in weights.values()))


def test_a_rewind_forgets_the_momentum(tmp_path: Path) -> None:
    """The step behind it goes as far as the network's first step, not as the sum of those since."""
    prune = {"target": 0.5, "rounds": 1, "rewind": 0}
    options: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.99, "schedule": "constant"}
    before = dict(small().module.state_dict())
    after = state(tuned(tmp_path, prune=prune, steps=40, **options))
    # 20 steps with momentum from rest go about as far as the first 20 did, pruned or not.
    first = state(tuned(tmp_path / "first", steps=20, **options))
    for name in ("conv.weight", "fc.weight"):
        alive = after[name] != 0
        far, near = ((found[name] - before[name])[alive].norm() for found in (after, first))
        assert 0 < far < 1.5 * near, name


@pytest.mark.parametrize("step", [3, 4, 6])
def test_pruning_in_rounds_resumes_to_the_same_bytes(tmp_path: Path, step: int) -> None:
    """Also right behind a rewind, where the optimizer has no moments."""
    prune = {"target": 0.75, "rounds": 2, "rewind": 1}
    options: dict[str, Any] = {"prune": prune, "steps": 10, "save_every": 1, "optimizer": "sgd"}
    whole = tuned(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        tuned(tmp_path / "broken", **options, stage=ending_at(step, "killed"))
    assert same(state(tuned(tmp_path / "broken", **options)), state(whole))


def test_only_networks_that_are_pruned_are_candidates(tmp_path: Path) -> None:
    """A denser network is better on held-out data, and is not what was asked for."""
    prune = {"target": 0.9, "rounds": 1}
    outcome = tuned(tmp_path, prune=prune, validation=0.2, steps=24)
    weights = [t for t in state(outcome).values() if t.ndim > 1]
    assert sum(int((t == 0).sum()) for t in weights) >= 0.85 * sum(t.numel() for t in weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 30}, "prune.rounds: is 30, and the training has 10 steps"),
        ({"rewind": 9}, "prune.rewind: is 9, and weights are pruned after step 7 of 10"),
        ({"rounds": 1, "rewind": 11}, "prune.rewind: is 11"),
    ],
)
def test_rounds_that_do_not_fit(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        tuned(tmp_path, steps=10, prune={"target": 0.5, **options})


def test_rounds_have_no_curve() -> None:
    with pytest.raises(SpecError, match="every is for pruning without rounds"):
        Gradual(target=0.5, rounds=2, every=3)


PRUNED: dict[str, Any] = {
    "prune": {"target": 0.5, "every": 2, "rewind": 1, "end": 0.3},
    "validation": 0.2,
}


def broken_off(folder: Path) -> list[Path]:
    """Leave a training in the middle; return what it saved."""
    with pytest.raises(Killed):
        tuned(folder, **PRUNED, save_every=3, stage=ending_at(8, "killed"))
    return [path for path in (folder / "state").rglob("*") if path.is_file()]


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_no_code_runs_from_a_saved_state(tmp_path: Path) -> None:
    folder, mark = tmp_path / "broken", tmp_path / "ran"
    saved = broken_off(folder)
    assert {path.suffix for path in saved} == {".json", ".safetensors"}
    (state_folder,) = (folder / "state").glob("state-*")
    for name in ("custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"):
        (state_folder / name).write_bytes(pickle.dumps(Touch(mark)))
    for path in saved:
        path.write_bytes(pickle.dumps(Touch(mark)))
    tuned(folder, **PRUNED)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["state-*/optimizer*", "state-*/progress*", "best-*/model*"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_state_is_not_used(tmp_path: Path, kind: str, how: str) -> None:
    whole = tuned(tmp_path / "whole", **PRUNED)
    folder = tmp_path / "broken"
    broken_off(folder)
    (path,) = (folder / "state").glob(kind)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if how == "gone":
        shutil.rmtree(path.parent)
    else:
        path.write_bytes(content if how == "flipped" else content[:-7])
    notes: list[str] = []
    resumed = tuned(folder, **PRUNED, note=notes.append)
    assert same(state(resumed), state(whole))
    assert not any("resumed" in note for note in resumed.notes)
    if how != "gone" or kind.startswith("best"):
        (note,) = notes
        assert note.startswith("the saved state of a training is damaged (")
        assert note.endswith("): it begins again")


def test_the_best_state_is_kept(tmp_path: Path) -> None:
    # A rate that ruins the network after a while: what is kept must be from before.
    outcome = tuned(
        tmp_path,
        steps=None,
        epochs=6.0,
        learning_rate=0.6,
        optimizer="sgd",
        schedule="constant",
        validation=0.25,
        data=SmallData(64, noisy=False),
    )
    note = next(n for n in outcome.notes if n.startswith("held-out accuracy"))
    best, end = float(note.split()[2]), float(note.split()[-4])
    assert best >= end


def test_training_stops_early(tmp_path: Path) -> None:
    outcome = tuned(
        tmp_path, steps=None, epochs=50.0, learning_rate=1e-12, validation=0.25, patience=2
    )
    epoch = 4  # of 30 samples in batches of 8
    assert f"over {3 * epoch} steps" in outcome.notes[0]


def test_divergence_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"step \d+ of 60.*losses before.*lower learning-rate"):
        tuned(
            tmp_path,
            steps=60,
            learning_rate=1e30,
            optimizer="sgd",
            schedule="constant",
        )


def test_labels_out_of_range_are_named(tmp_path: Path) -> None:
    data = SmallData()
    data.labels = data.labels + 1
    with pytest.raises(DataError, match="labels 1 to 3 for 3 classes"):
        tuned(tmp_path, data=data)


def test_batches_must_divide_over_processes(tmp_path: Path) -> None:
    class Three:
        rank, size = 0, 3

        def wait(self) -> None:
            """Go on."""

        def gathered(self, value: Any) -> list[Any]:
            """Return it."""
            return [value]

    chosen = Finetune.model_validate({"steps": 1})
    with pytest.raises(SpecError, match="is 8, and 3 processes share it; set a multiple of 3"):
        chosen.apply_training(small(), CONTEXT, {}, training(tmp_path, small(), ranks=Three()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 2}, "patience needs validation"),
        ({"prune": {"target": 0.5, "begin": 0.5, "end": 0.4}}, "is not after begin"),
        ({"data": SmallData(0)}, "has 0 samples to train on"),
        ({"milestones": (0.5,)}, "milestones with schedule: cosine; set schedule: step"),
        ({"momentum": 0.5}, "momentum with optimizer: adamw; set optimizer: sgd"),
        ({"epochs": 1.0, "steps": 5}, "has epochs and steps; leave one of them out"),
        ({"batch": 8, "micro_batch": 9}, "micro-batch 9 is more than a batch"),
        ({"loss": "hinge"}, "set cross-entropy, mse or package.module:function"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, CompressorError), match=message):
        tuned(tmp_path, **options)


def test_labels_are_smoothed_for_cross_entropy_only(tmp_path: Path) -> None:
    smooth = Finetune.model_validate({"label_smoothing": 0.1})
    assert smooth.survey(small(), CONTEXT).notes[0] == "trained with cross-entropy as loss"
    other = smooth.model_copy(update={"loss": "mse"})
    with pytest.raises(SpecError, match=r"label-smoothing: is 0\.1, and the loss is mse"):
        other.survey(small(), CONTEXT)
    assert not same(state(tuned(tmp_path / "a", label_smoothing=0.1)), state(tuned(tmp_path / "b")))


def test_the_users_loss_is_used(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum(1) + 0 * target

    start = small(dropout=0.0)
    given = training(tmp_path, start)
    given = type(given)(**{**vars(given), "load_symbol": lambda *_: loss})
    chosen = Finetune.model_validate({"steps": 30, "learning_rate": 0.05, "loss": "my.module:loss"})
    outcome = chosen.apply_training(start, CONTEXT, {}, given)
    batch = {"x": SmallData().images}
    assert isinstance(outcome.carrier, TorchCarrier)
    before = np.square(start.module_outputs(batch)[0]).sum()
    after = np.square(outcome.carrier.module_outputs(batch)[0]).sum()
    assert after < 0.2 * before
