"""Runnable samples, each with its own spec, data and README."""
