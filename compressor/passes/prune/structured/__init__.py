"""``prune-structured``: channels, filters and attention heads removed."""
