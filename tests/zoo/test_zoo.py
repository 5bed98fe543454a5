"""What `make zoo` has found: nothing is wrong."""

from __future__ import annotations

import pytest

from tests.zoo.page import OURS, verdicts
from tests.zoo.run import results

pytestmark = pytest.mark.zoo


def test_nothing_is_wrong() -> None:
    wrong = [
        f"{case} {name}: {verdict.reason}"
        for case, line in results().items()
        for name, verdict in verdicts(line).items()
        if name in OURS and verdict.state == "wrong"
    ]
    assert not wrong, "\n".join(wrong)
