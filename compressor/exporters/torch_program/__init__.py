"""Graphs as programs of PyTorch operators, which ExecuTorch and Core ML Tools read."""
