"""The storage artifact: ``model.safetensors`` and ``model.json``."""
