"""``prune-magnitude``: single weights or blocks removed by their size."""
