"""Errors of the file system that a library hides in its own."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise what the system said, where safetensors repeats it as text.

    Raises:
        OSError: with the number of the system's error.
    """
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
