"""Training by ``distill``: what is learnt from whom, how it goes on, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from compressor.passes.prune.structured.structured import PruneStructured
from compressor.passes.train.distill.distill import Distill
from compressor.passes.train.distill.distilling import Distillation, DistilledLoss
from compressor.passes.train.distill.teacher_outputs import TeacherOutputs
from compressor.passes.train.distill.teachers import Teacher
from compressor.passes.train.job import Micro
from compressor.passes.train.losses import kl_divergence
from compressor.run.metrics.metrics import MSE
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from tests.compressor.passes.train.distill_models import (
    Killed,
    Unlabelled,
    as_onnx,
    block,
    counted,
    distilled,
    divergence,
    executing,
    killed_at,
    noise,
    same,
    state,
    student,
    term,
)
from tests.compressor.passes.train.small_training import INPUTS, SmallData

PLAIN = SmallData(40, noisy=False)


def test_a_student_learns_what_the_teacher_does_without_labels(tmp_path: Path) -> None:
    before = divergence(block(4), block())
    outcome = distilled(
        tmp_path, block(4), block(), alpha=0.0, data=Unlabelled(noisy=False), steps=150
    )
    assert divergence(outcome.carrier, block()) < 0.2 * before
    (note,) = Distill(alpha=0.0).survey(block(4), PassContext()).notes
    assert note.startswith("the loss is the divergence from the teacher's")
    assert not Distill(alpha=0.0).labelled
    assert Distill().labelled


def test_alpha_weighs_target_and_teacher(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 1, "data": PLAIN, "temperature": 2.0}
    found = {
        alpha: distilled(tmp_path / str(alpha), student(), block(), alpha=alpha, **options)
        for alpha in (0.25, 0.5)
    }
    assert term(found[0.5], "hard") == pytest.approx(2 * term(found[0.25], "hard"), rel=1e-3)
    assert term(found[0.25], "soft") == pytest.approx(1.5 * term(found[0.5], "soft"), rel=1e-3)
    assert Distill(alpha=0.5).labelled


def test_numbers_are_drawn_to_the_teachers(tmp_path: Path) -> None:
    outcome = distilled(
        tmp_path, student(), block(), alpha=0.0, metric=MSE, data=Unlabelled(), steps=60
    )
    batch = {"x": PLAIN.images}
    theirs = block().runner().run(batch)
    error = {
        name: sum(
            ((a - b) ** 2).mean()
            for a, b in zip(c.runner().run(batch).values(), theirs.values(), strict=True)
        )
        for name, c in (("before", student()), ("after", outcome.carrier))
    }
    assert error["after"] < 0.5 * error["before"]


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_an_interrupted_training_ends_in_the_same_bytes(
    tmp_path: Path, noisy: bool, cache: bool
) -> None:
    options: dict[str, Any] = {
        "save_every": 3,
        "cache": cache,
        "data": SmallData(40, noisy),
        "features": ({"student": "conv", "teacher": "conv"},),
    }
    whole = distilled(tmp_path / "whole", student(), block(), **options)
    with pytest.raises(Killed):
        distilled(tmp_path / "broken", student(), block(), **options, stage=killed_at(8))
    resumed = distilled(tmp_path / "broken", student(), block(), **options)
    assert "resumed from the state saved after step 6" in resumed.notes
    assert same(resumed, whole)
    if cache and noisy:  # steps 7 and 8 were done before
        assert counted(resumed) == (32, 16)
    elif cache:  # all samples were done before the first step
        assert counted(resumed) == (0, 48)


def test_a_kill_while_the_teacher_computes_changes_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": PLAIN}
    whole = distilled(tmp_path / "whole", student(), block(), **options)
    stage = killed_at(2, name="teacher outputs")
    with pytest.raises(Killed):
        distilled(tmp_path / "broken", student(), block(), **options, stage=stage)
    resumed = distilled(tmp_path / "broken", student(), block(), **options)
    assert counted(whole) == (40, 96)
    assert counted(resumed) == (24, 96)
    assert same(resumed, whole)


def test_outputs_in_the_cache_change_nothing(tmp_path: Path) -> None:
    first = distilled(tmp_path, student(), block(), cache=False)
    second = distilled(tmp_path / "own", student(), block(), cache=True)
    assert "it is off" in first.notes[-1]
    assert counted(second) == (96, 0)
    assert same(first, second)


def again(folder: Path, teacher: Any = None, **options: Any) -> tuple[int, int]:
    """Train with the cache of a first training, which was with the options' defaults."""
    (folder / "state").rename(folder / f"state-{len(list(folder.iterdir()))}")
    return counted(distilled(folder, student(), teacher or block(), **options))


def test_the_cache_serves_other_trainings_of_the_same_order(tmp_path: Path) -> None:
    distilled(tmp_path, student(), block())
    assert again(tmp_path, alpha=0.5, temperature=1.0, learning_rate=0.01) == (0, 96)
    assert again(tmp_path, steps=14) == (16, 96)  # two steps more
    assert again(tmp_path, seed=4) == (96, 0)
    assert again(tmp_path, batch=4) == (48, 0)
    assert again(tmp_path, micro_batch=4) == (96, 0)
    assert again(tmp_path, data=SmallData(44)) == (88, 0)  # an epoch's last step has four
    other = block().with_weights({"fc.bias": torch.ones(3)})
    assert again(tmp_path, other) == (96, 0)
    assert again(tmp_path) == (0, 96)


def test_without_random_numbers_one_entry_serves_all_epochs(tmp_path: Path) -> None:
    outcome = distilled(tmp_path, student(), block(), data=PLAIN, steps=None, epochs=3.0)
    assert counted(outcome) == (40, 120)
    assert again(tmp_path, data=PLAIN, steps=None, epochs=5.0, batch=8) == (0, 200)
    folders = list((tmp_path / "cache").iterdir())
    assert len(folders) == 1
    files = {f.name: f.stat().st_size for f in folders[0].iterdir() if f.suffix == ".bin"}
    assert files == {"0.bin": 40 * 3 * 4, "checksums.bin": 40 * 8}


def test_held_out_samples_are_validated_with_the_teacher(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "validation": 0.25,
        "alpha": 0.0,
        "data": Unlabelled(),
        "metric": None,
        "steps": 10,
    }
    chosen = {"soft": "kl", **options}
    first = distilled(tmp_path / "one", student(), block(), cache=False, **chosen)
    second = distilled(tmp_path / "two", student(), block(), cache=True, **chosen)
    assert any(note.startswith("held-out loss") for note in first.notes)
    assert counted(first)[0] == counted(second)[0] + counted(second)[1]
    assert counted(second)[1] == 2 * 10  # the second and third validation
    assert same(first, second)


def test_a_teacher_gives_the_same_by_pytorch_and_by_onnx_runtime() -> None:
    images = {"x": torch.from_numpy(noise(0, 5, 2, 6, 6))}
    outputs = [o.name for o in block().outputs]
    by_session = Teacher(as_onnx(), INPUTS, outputs, ("conv", "body.0"))
    by_module = Teacher(block(), INPUTS, outputs, ("conv", "body.0", "body"))
    assert by_session.runtime.startswith("onnxruntime")
    assert by_module.runtime.startswith("torch")
    ours, theirs = by_session(images), by_module(images)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
    assert theirs["body"].shape == (5, 8, 4, 4)


def test_a_teacher_runs_as_in_evaluation() -> None:
    images = {"x": torch.from_numpy(noise(0, 5, 2, 6, 6))}
    (output,) = [o.name for o in student().outputs]  # of a network with batch norm and dropout
    by_module = Teacher(student(), INPUTS, [output], ("bn",))
    assert by_module.runtime.startswith("torch")
    wanted = student().runner().run({"x": images["x"].numpy()})[output]
    torch.testing.assert_close(by_module(images)[output], torch.from_numpy(wanted))


def test_an_onnx_file_teaches_as_its_module_does(tmp_path: Path) -> None:
    # AdamW makes whole steps of gradients that are rounding errors, as a bias before a norm has.
    default = distilled(tmp_path / "one", student(), block(), optimizer="sgd")
    models: dict[str, Carrier] = {"t.onnx": as_onnx()}
    options: dict[str, Any] = {"teacher": {"onnx": "t.onnx"}, "optimizer": "sgd"}
    named = distilled(tmp_path / "two", student(), block(6), models, **options)
    assert Distill.model_validate(options).other_models == {"teacher": {"onnx": "t.onnx"}}
    for name, value in state(default).items():
        torch.testing.assert_close(state(named)[name], value, rtol=1e-4, atol=1e-5)


def test_a_pruned_network_learns_from_the_whole_one(tmp_path: Path) -> None:
    prune = PruneStructured.model_validate({"target": {"macs": 0.5}})
    pruned = prune.apply(block(), PassContext(), {}).carrier
    before = divergence(pruned, block())
    assert before > 0.01
    pair = {"student": "body.0", "teacher": "body.0"}
    outcome = distilled(
        tmp_path,
        pruned,
        block(),
        alpha=0.0,
        features=(pair,),
        data=PLAIN,
        steps=80,
        learning_rate=0.01,
    )
    assert divergence(outcome.carrier, block()) < 0.3 * before
    assert state(outcome)["conv.weight"].shape == pruned.tensors()["conv.weight"].shape


def test_a_network_that_executes_its_graph_learns_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "features": ({"student": "body.0", "teacher": "body.0"},),
        "attention": ({"student": "conv", "teacher": "conv"},),
        "save_every": 3,
    }
    whole = distilled(tmp_path / "whole", executing(), block(), **options)
    with pytest.raises(Killed):
        distilled(tmp_path / "broken", executing(), block(), **options, stage=killed_at(5))
    assert same(distilled(tmp_path / "broken", executing(), block(), **options), whole)
    assert state(whole).keys() == executing().tensors().keys()
    plain = distilled(tmp_path / "plain", block(4), block(), **options)
    for name, value in state(plain).items():
        torch.testing.assert_close(state(whole)[name], value, rtol=1e-3, atol=1e-4)


def test_positions_without_a_label_are_not_compared() -> None:
    class Outputs:
        def of(self, micro: Any, inputs: Any, step: int) -> dict[str, torch.Tensor]:
            del micro, inputs, step
            return {"y": torch.from_numpy(noise(1, 2, 3, 5))}

    ours = torch.from_numpy(noise(0, 2, 3, 5))
    labels = torch.tensor([[1, -100, -100], [-100, 2, 3]])
    options, teacher = Distillation(alpha=0.0, temperature=2.0), cast("TeacherOutputs", Outputs())
    inputs = [spec.name for spec in student().inputs]
    loss = DistilledLoss(options, "kl", None, inputs, ["y"], {}, teacher, "label")
    micro = Micro(PLAIN.labels[:2], {"x": ours, "label": labels})
    found = loss.losses({"y": ours}, micro, 0)["soft"]
    theirs = torch.from_numpy(noise(1, 2, 3, 5))
    torch.testing.assert_close(found[0], kl_divergence(ours[0, :1], theirs[0, :1], 2.0)[0])
    torch.testing.assert_close(found[1], kl_divergence(ours[1, 1:], theirs[1, 1:], 2.0).mean())
