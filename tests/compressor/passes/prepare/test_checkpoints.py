"""Scaled channels in directories of ``transformers``: only weights change, and any factors do."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compressor.errors import SpecError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prepare.balance import ScaledGroup, scaled_weights
from compressor.passes.prepare.equalize import Equalize
from compressor.passes.prepare.groups import scale_map
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.scales import ScaleGroup
from compressor.progress import quiet_libraries
from compressor.types.passes import PassContext
from tests.compressor.models.transformers_folders import KINDS, opened, save

IDS = torch.arange(24).reshape(2, 12) % 37


@cache
def groups(carrier: TorchCarrier) -> tuple[ScaleGroup, ...]:
    """Return what takes factors over by itself."""
    model, parameters = carrier.graph(), carrier.tensors().keys()
    names = [layer.name for layer in carrier.layers() if layer.is_linear]
    every = with_product_groups(scale_map(model, parameters), model, names, parameters).groups
    return tuple(group for group in every if not group.inserted)


@pytest.fixture(scope="module", params=["llama", "bert"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / request.param
    save(path, request.param)
    return path


def logits(folder: Path) -> np.ndarray:
    """Return what transformers computes with a directory."""
    with quiet_libraries(), torch.inference_mode():
        module = getattr(transformers, KINDS[folder.name][0]).from_pretrained(folder)
        return module.eval()(IDS).logits.numpy()


@pytest.mark.slow
def test_any_factors_keep_what_a_directory_computes(folder: Path, tmp_path: Path):
    carrier, wanted = opened(folder, KINDS[folder.name][0]), logits(folder)
    scalable = groups(carrier)
    assert len(scalable) == {"llama": 5, "bert": 1}[folder.name], [g.name for g in scalable]
    stored = {name: tensor.read() for name, tensor in carrier.tensors().items()}

    @settings(max_examples=3, deadline=None, database=None)
    @given(st.integers(0, 1000), st.floats(0.5, 4.0))
    def keeps(seed: int, most: float) -> None:
        random = torch.Generator().manual_seed(seed)
        scaled = [
            ScaledGroup(g, torch.exp2(most * (2 * torch.rand(g.count, generator=random) - 1)), 0.0)
            for g in scalable
        ]
        changed = scaled_weights(carrier, scaled)
        assert changed
        target = tmp_path / folder.name
        shutil.copytree(folder, target, dirs_exist_ok=True)
        save_file({**stored, **changed}, target / "model.safetensors", {"format": "pt"})
        np.testing.assert_allclose(logits(target), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    keeps()


def test_a_bare_checkpoint_has_nobody_who_knows_its_layers(folder: Path):
    with pytest.raises(SpecError, match=r"bare checkpoint offers weights only.*model\.factory"):
        Equalize().survey(open_checkpoint(folder), PassContext())
