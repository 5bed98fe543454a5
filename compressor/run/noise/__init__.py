"""How much noise compression adds to each layer."""
