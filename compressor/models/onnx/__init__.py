"""ONNX files: read, checked, run."""
