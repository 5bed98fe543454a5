"""``quantize-static``: calibrated integer weights and activations."""
