"""``prune-nm``, ``prune-wanda`` and ``prune-sparsegpt``: weights removed in patterns."""
