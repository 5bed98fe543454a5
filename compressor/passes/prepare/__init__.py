"""Changes that keep a network's function and make it lose less when it is quantized."""
