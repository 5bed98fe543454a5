"""``qat``: quantization-aware training."""
