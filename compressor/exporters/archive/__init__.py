"""The exporter ``archive``: the smallest file."""
