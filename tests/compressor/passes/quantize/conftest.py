"""Models that several files quantize; a carrier is a value, so that all may share one."""

from __future__ import annotations

import pytest

from compressor.types.carrier import Carrier
from tests.compressor.passes.quantize.weight_only_models import IMAGE, Language, Mixed, carrier


@pytest.fixture(scope="package")
def language() -> Carrier:
    return carrier(Language())


@pytest.fixture(scope="package")
def mixed() -> Carrier:
    return carrier(Mixed(), IMAGE)
