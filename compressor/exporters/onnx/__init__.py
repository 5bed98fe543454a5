"""The ONNX artifact: ``model.onnx``, with ``model.onnx.data`` where it is needed."""
