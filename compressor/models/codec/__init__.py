"""Our safetensors, read and written in one place."""
