"""Calibration: data sources, observers of activations, and the pass that feeds one to the other."""
