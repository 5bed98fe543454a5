"""The page on Python: its code is run in its order, on a tiny network."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.compressor.brief_timing import time_briefly
from tests.compressor.tiny_project import sample_images, tiny_module
from tests.docs.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "python.md"


def halve(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**batch, "image": batch["image"] / 2}


@pytest.mark.slow  # four runs, and a training by the Trainer
@pytest.mark.filterwarnings("ignore:.pin_memory. argument:UserWarning")
def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    time_briefly(monkeypatch)
    module, images = tiny_module(), torch.from_numpy(sample_images(1))
    with torch.no_grad():
        data = TensorDataset(images, module(images).argmax(1))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    names: dict[str, Any] = {"module": module, "loader": loader, "torch": torch, "halve": halve}
    names["val_loader"] = DataLoader(data, batch_size=48)
    codes = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(codes) == 5
    with chdir(tmp_path):
        exec(compile(codes[0].text, str(PAGE), "exec"), names)
        assert (tmp_path / "out" / "edge" / "model.onnx").is_file()
        assert "model.onnx" in capsys.readouterr().out
        exec(compile(codes[1].text, str(PAGE), "exec"), names)
        assert [a.format for a in names["result"].artifacts] == ["safetensors", "onnx"]
        for code in codes[2:4]:
            exec(compile(code.text, str(PAGE), "exec"), names)
    assert isinstance(names["smaller"], type(module))
    assert names["result"].report["passes"][0]["pass"] == "qat"
    names["transformers"] = pytest.importorskip("transformers")
    names["rows"] = [{"image": image, "labels": label} for image, label in data]
    with chdir(tmp_path):
        exec(compile(codes[4].text, str(PAGE), "exec"), names)
        assert list((tmp_path / "out" / "trainer").rglob("model.safetensors"))
    lines = [line for line in codes[0].text.splitlines() if line and not line.startswith("print")]
    assert len(lines) <= 6  # from a module and a loader to a judged file
