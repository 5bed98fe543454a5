"""Which channels of an ONNX IR graph depend on each other, and the graph without some of them."""
