"""Every name and file that a sample's spec mentions exists and fits together."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML

import samples
from compressor.run.verdicts.statistics import interval

ROOT = Path(samples.__file__).parent


def read(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = YAML(typ="safe").load(ROOT / name)
    return spec


def resolve(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function


def locate(spec: str, path: str) -> Path:
    if "${COMPRESSOR_DATA}" in path and not os.environ.get("COMPRESSOR_DATA"):
        pytest.skip("COMPRESSOR_DATA is not set")
    located = (ROOT / spec).parent / os.path.expandvars(path)
    if "${COMPRESSOR_DATA}" in path and not located.exists():
        pytest.skip(f"COMPRESSOR_DATA holds no {located.name}")
    return located


@pytest.mark.parametrize("name", ["digits/spec.yaml", "digits/tensorrt.yaml", "cifar/spec.yaml"])
def test_transformed_data_fits_the_model(name: str) -> None:
    spec = read(name)
    assert spec["version"] == 1
    model = resolve(spec["model"]["factory"])().eval()
    (key, declared), *_ = spec["model"]["inputs"].items()
    assert locate(name, spec["model"]["checkpoint"]).is_file()
    for section in ("calibration", "evaluation"):
        source = spec["data"][section]
        with np.load(locate(name, source["npz"])) as file:
            batch = {key: file[array][:2] for key, array in source["inputs"].items()}
        batch = resolve(source["transform"])(batch)
        assert batch[key].dtype == declared["dtype"]
        assert list(batch[key].shape[1:]) == declared["shape"][1:]
        with torch.inference_mode():
            assert model(torch.from_numpy(batch[key])).shape == (2, 10)


@pytest.mark.parametrize(
    "name", ["digits/spec.yaml", "digits/tensorrt.yaml", "cifar/spec.yaml", "cifar/full.yaml"]
)
def test_the_samples_are_enough_to_prove_the_limit(name: str) -> None:
    spec = read(name)
    with np.load(locate(name, spec["data"]["evaluation"]["npz"])) as file:
        count = len(file[spec["data"]["evaluation"]["target"]])
    _, most = interval(count // 200, 0, count)  # one answer in 200 lost
    assert 100 * most <= spec["limits"]["metric-drop"]
