"""Core ML packages, for Apple's devices."""
