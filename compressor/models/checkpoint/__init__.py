"""Bare safetensors checkpoints, streamed."""
