"""Say what is in a file or folder: a checkpoint, an ONNX model, a run's output."""
