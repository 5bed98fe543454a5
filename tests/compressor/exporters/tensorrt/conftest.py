"""What tests of engines share."""

import pytest
import torch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a GPU, should there be one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
