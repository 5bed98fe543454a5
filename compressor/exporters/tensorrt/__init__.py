"""The TensorRT artifact: ``model.engine``, and what is in it in ``model.engine.json``."""
