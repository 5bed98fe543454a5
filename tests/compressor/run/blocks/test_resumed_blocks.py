"""What a run of blocks goes on from: flows of all processes; keys of what blocks are built of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compressor.models.transformers import block_checkpoint
from compressor.run.blocks.flow import Flow
from compressor.run.model import open_model
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from compressor.types.data import Alone
from tests.compressor.run.blocks import test_decoder_blocks
from tests.compressor.run.blocks.test_decoder_blocks import GPTQ, LAYERS, passed, value_of

llama = test_decoder_blocks.llama


def test_what_enters_a_block_is_kept_until_all_processes_are_through_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[object] = []
    write, forget = Flow.write, Flow.forget
    monkeypatch.setattr(Alone, "wait", lambda _: events.append("wait"))
    monkeypatch.setattr(Flow, "write", lambda *a: (write(*a), events.append(("write", a[1]))))
    monkeypatch.setattr(Flow, "forget", lambda *a: (forget(*a), events.append(("forget", a[1]))))
    passed(llama, "half", GPTQ, tmp_path / "out")
    flows = [event for event in events if event != "wait"]
    assert flows == [("write", 1), ("forget", 0), ("write", 2), ("forget", 1)]
    for index in range(LAYERS - 1):
        assert events[events.index(("forget", index)) - 1] == "wait"


def test_the_key_of_a_checkpoint_holds_what_its_blocks_are_built_of(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def keys() -> list[str]:
        value = value_of(tmp_path, "wide", GPTQ, tmp_path / "out")
        opened = open_model(check_spec(Document(Path("spec.yaml"), value)))
        assert opened.quick_digest is not None
        return [opened.digest(), opened.quick_digest()]

    shutil.copytree(llama / "wide", tmp_path / "wide")
    shutil.copy(llama / "tokens.npz", tmp_path)
    found = [keys()]
    file = tmp_path / "wide" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.1}))
    found.append(keys())
    monkeypatch.setattr(block_checkpoint, "library_version", lambda: "99.0")
    found.append(keys())
    assert len({key for both in found for key in both}) == 6
