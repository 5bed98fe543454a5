"""``quantize-weights``: weights in few bits, activations as they are."""
