"""A folder that diffusers wrote is not one of transformers, and is told what to do with it."""

import json
from pathlib import Path

import pytest

from compressor.errors import ModelError
from compressor.models.transformers.networks import read_config


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"_class_name": "AutoencoderKL"}, r"is of diffusers \(AutoencoderKL\).*\.safetensors"),
        ({}, "has no model_type; fetch it again"),
    ],
)
def test_a_folder_of_diffusers_is_told_apart(
    config: dict[str, str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        read_config(tmp_path)
