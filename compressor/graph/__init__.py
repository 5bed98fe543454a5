"""Reading of ONNX IR graphs, the graph language of every carrier."""
