"""Which layer costs what, and what to do about it."""
