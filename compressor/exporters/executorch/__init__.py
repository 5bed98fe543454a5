"""ExecuTorch files: PyTorch's format for phones, computed by XNNPACK."""

from compressor.exporters.executorch.exporter import ExecutorchExporter

__all__ = ["ExecutorchExporter"]
