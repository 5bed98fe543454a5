"""Export to ONNX Runtime's own format."""
