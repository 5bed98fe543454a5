"""Passes that set weights to zero, or remove channels."""
