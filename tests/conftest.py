"""Settings for all tests."""

import os
import signal
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings

# As the command line does, before PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with interrupts ignored, and child processes would
# inherit that; tests that interrupt them could not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("shared-machine", deadline=None, derandomize=True)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session", autouse=True)
def one_registry() -> Iterator[None]:
    """Let PyTorch's exporter build its table of operators once, not for every module.

    That is half the time of lowering a small network. The exporter reads the table only; a user's
    process lowers one module and gains nothing by it.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    build = cache(ONNXRegistry.from_torchlib)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(build))
        yield
