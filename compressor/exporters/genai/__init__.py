"""ONNX with a cache of keys and values, for onnxruntime-genai."""
