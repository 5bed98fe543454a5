"""Quantization: fewer bits for weights and activations."""
