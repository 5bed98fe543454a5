"""Settings for all tests."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, settings

# As the command line does, before PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with interrupts ignored, and child processes would
# inherit that; tests that interrupt them could not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_UNSHRUNK = (Phase.explicit, Phase.generate)
settings.register_profile("thorough", deadline=None, derandomize=True)
settings.register_profile("shared-machine", settings.get_profile("thorough"), max_examples=50)
# A mutation run (docs/mutants.md) asks whether a test fails, not for the smallest example, and a
# bug that one example in thirty does not show waits for all of them thousands of times.
settings.register_profile(
    "mutants", settings.get_profile("shared-machine"), phases=_UNSHRUNK, max_examples=30
)
settings.load_profile("mutants" if "MUTANT_UNDER_TEST" in os.environ else "shared-machine")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what the fixtures below need; a mutation run does so once, before it forks."""
    if session.config.getoption("dist", "no") != "no":
        return  # the processes that this one starts do
    # What is imported and collected lives until the end, and looking for garbage among it was a
    # fifth of collecting.
    gc.disable()
    import torch.backends.cudnn

    import compressor.models.torch.carrier  # noqa: F401
    import tests.exporter_tables  # noqa: F401

    # Where there is a GPU, what it computes is compared to more than the ten bits of this type.
    torch.backends.cudnn.allow_tf32 = False


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def uncounted_heap() -> Iterator[Callable[[], int]]:
    """Let a run see that objects are frozen without counting a million of them each time.

    Returns:
        The function that counts them.
    """
    count = gc.get_freeze_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield count


class Heap:
    """The objects that live until the end."""

    def __init__(self) -> None:
        self._modules = 0

    def settle(self) -> None:
        """Keep the collector away from them; each mutant's process shares them with the others."""
        if "MUTANT_UNDER_TEST" not in os.environ:
            gc.set_threshold(20_000, 20, 50)
            gc.collect()
            gc.freeze()
            self._modules = len(sys.modules)

    def settle_imports(self) -> None:
        """Do so if more has been imported."""
        if len(sys.modules) > self._modules:
            self.settle()


@pytest.fixture(scope="session")
def heap() -> Heap:
    return Heap()


@pytest.fixture(scope="module", autouse=True)
def settled_heap(heap: Heap) -> None:
    """Keep the collector away from what lives until the end.

    Each run collects garbage after each step. Half a second of each time went into the suite
    itself, the libraries, and what the tests before have left. Exporting a network makes a hundred
    thousand objects, of which few are garbage before it ends.
    """
    heap.settle()


@pytest.fixture(autouse=True)
def settled_imports(heap: Heap) -> None:
    """Keep it away from what the tests before have imported, too: 25 ms of each time."""
    heap.settle_imports()


@pytest.fixture(scope="session", autouse=True)
def lowered_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lower modules that are alike once."""
    from compressor.models.torch import carrier
    from tests.lowered_once import remembering

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "lowered"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrier, "lower", remembering(carrier.lower, folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def tables_built_once() -> Iterator[None]:
    """Let PyTorch's exporter build its tables of operators once, not for every module."""
    from tests.exporter_tables import build_once

    with pytest.MonkeyPatch.context() as patch:
        build_once(patch)
        yield
