"""Settings for all tests."""

import os

from hypothesis import settings

# As the command line does, before PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("shared-machine", deadline=None, derandomize=True)
settings.load_profile("shared-machine")
