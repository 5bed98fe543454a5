"""The cost of each layer in quality, and changes that reduce it."""
