"""The mathematics of quantization: tensors in, tensors out."""
