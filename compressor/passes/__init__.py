"""Compression techniques, one a file."""
