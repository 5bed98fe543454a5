"""ExecuTorch files: PyTorch's format for phones, computed by XNNPACK."""
