"""Networks with fewer channels than their factory gives them: exported and loaded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import compressor
from compressor.exporters import OnnxExporter, SafetensorsExporter
from compressor.models.torch.carrier import TorchCarrier
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.models.smaller_modules import (
    VECTOR,
    Free,
    Rigid,
    hidden_kept,
    lowered_cut,
    shaken,
    worst,
)


@pytest.mark.parametrize("kind", [Free, Rigid])
def test_a_smaller_network_loads_without_its_factory(kind: type[Free], tmp_path: Path) -> None:
    kept = hidden_kept(1, 3, 4, 7)
    graph = lowered_cut(shaken(Free()), VECTOR, kept, {})
    carrier = TorchCarrier(shaken(kind()), VECTOR).with_channels(graph, kept)
    assert isinstance(carrier, TorchCarrier)
    assert carrier.executes_graph == (kind is Rigid)
    rows = {"x": np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32)}
    (wanted,) = carrier.module_outputs(rows)

    made = SafetensorsExporter()
    made.check(carrier)
    made.write(carrier, tmp_path, CONTEXT)
    loaded = compressor.load(tmp_path)
    assert not isinstance(loaded, kind)
    with torch.inference_mode():
        found = loaded(torch.from_numpy(rows["x"]))["output"].numpy()
    assert worst(found, wanted) < 1e-6
    assert loaded.state_dict()["up.weight"].shape == (4, 6)
    assert torch.equal(loaded.state_dict()["up.weight"], carrier.module.state_dict()["up.weight"])

    (path,) = (p for p in OnnxExporter().write(carrier, tmp_path, CONTEXT) if p.suffix == ".onnx")
    (served,) = OnnxExporter().open(path).run(rows).values()
    assert worst(served, wanted) < 1e-5
