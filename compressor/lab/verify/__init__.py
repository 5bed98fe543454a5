"""Prove artifacts byte for byte."""
