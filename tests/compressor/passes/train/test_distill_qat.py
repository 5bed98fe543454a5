"""Learning from a teacher inside ``qat``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import SpecError
from compressor.passes.train.qat.qat import Qat
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome
from tests.compressor.passes.train.distill_models import Unlabelled, block, divergence, opening
from tests.compressor.passes.train.small_qat import CONTEXT, material
from tests.compressor.passes.train.small_training import SmallData
from tests.compressor.passes.train.test_finetune import Killed, ending_at

TWO: dict[str, Any] = {"weights": {"bits": 2}}


def quantized(folder: Path, models: dict[str, Carrier] | None = None, **options: Any) -> Outcome:
    own = {k: options.pop(k) for k in ("data", "stage") if k in options}
    given = replace(material(folder, block(), **own), open_model=opening(models or {}))
    chosen = Qat.model_validate({"steps": 8, "learning_rate": 0.01, **TWO, **options})
    return chosen.apply_training(block(), CONTEXT, {}, given)


def test_a_quantized_network_learns_from_the_float_one_without_labels(tmp_path: Path) -> None:
    options: dict[str, Any] = {"distill": {"alpha": 0.0}, "data": Unlabelled(noisy=False)}
    first = quantized(tmp_path / "first", steps=1, **options)
    last = quantized(tmp_path / "last", steps=60, **options)
    assert divergence(last.carrier, block()) < 0.3 * divergence(first.carrier, block())
    assert any(note.startswith("teacher outputs: 40 samples computed") for note in last.notes)
    step = Qat.model_validate({**TWO, "distill": {"alpha": 0.0}})
    assert "the loss is against a teacher" in step.survey(block(), CONTEXT).notes
    assert not step.labelled


def test_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"distill": {}, "save_every": 3, "data": SmallData()}
    whole = quantized(tmp_path / "whole", **options)
    with pytest.raises(Killed):
        quantized(tmp_path / "broken", **options, stage=ending_at(5, "killed"))
    resumed = quantized(tmp_path / "broken", **options)
    ours, theirs = (c.carrier.graph().graph.initializers for c in (resumed, whole))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name].const_value
        assert value.const_value is not None
        assert other is not None
        assert value.const_value.tobytes() == other.tobytes(), name


def test_its_teacher_may_be_another(tmp_path: Path) -> None:
    options: dict[str, Any] = {"distill": {"teacher": {"onnx": "t.onnx"}}}
    chosen = Qat.model_validate({**TWO, **options})
    assert chosen.other_models == {"distill.teacher": {"onnx": "t.onnx"}}
    with pytest.raises(SpecError, match=r"teacher: returns .* 5"):
        chosen.check_models(block(), {"distill.teacher": block(8, 5)})
    quantized(tmp_path, {"t.onnx": block(6)}, **options)
