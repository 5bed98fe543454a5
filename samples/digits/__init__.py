"""Handwritten digits: a small residual network on real 8x8 scans, complete in the repository."""
