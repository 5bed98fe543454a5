"""CIFAR-10: the published ResNet-20 checkpoint, quantized to int8."""
