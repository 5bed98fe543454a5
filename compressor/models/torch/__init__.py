"""PyTorch modules: a factory and a checkpoint."""
