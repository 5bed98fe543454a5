"""Metrics: one value a sample, and what noise in the outputs does to it."""
