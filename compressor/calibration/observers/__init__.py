"""Observers of activations: each finds the range that a quantizer is to represent."""
