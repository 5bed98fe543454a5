"""``archive``: the smallest file without a significant loss."""
