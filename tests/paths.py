"""Where the repository lies, for tests in folders of any depth."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
