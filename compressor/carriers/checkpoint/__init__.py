"""Safetensors checkpoints on disk: their headers, their folders, and reads of parts of them."""
