"""What is in a checkpoint, an ONNX file, an engine or an output folder."""
