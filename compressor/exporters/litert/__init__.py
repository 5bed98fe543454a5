"""LiteRT files: the format of TensorFlow Lite, for phones and microcontrollers."""
