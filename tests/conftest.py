"""Settings for all tests."""

import os
import signal

from hypothesis import settings

# As the command line does, before PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with interrupts ignored, and child processes would
# inherit that; tests that interrupt them could not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("shared-machine", deadline=None, derandomize=True)
settings.load_profile("shared-machine")
