"""Passes that train a model's weights."""
