"""Searches for a clipping range: tensors in, numbers out, in units of the bin width."""
