from __future__ import annotations

import math

import pytest
import torch

from compressor.types.layers import sqnr_db


def test_sqnr() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert sqnr_db(reference, reference) is None
    assert sqnr_db(torch.zeros(2), reference) is None
    assert sqnr_db(reference, torch.tensor([3.0, 4.5])) == pytest.approx(20.0)
    with pytest.raises(ValueError, match="differ"):
        sqnr_db(reference, torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        sqnr_db(reference, torch.tensor([math.inf, 0.0]))


def test_sqnr_of_many_values_is_the_whole_sum() -> None:
    reference = torch.ones(1 << 19)
    assert sqnr_db(reference, reference * 0.9) == pytest.approx(20.0, abs=1e-5)
