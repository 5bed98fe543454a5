"""Where a model's time goes, and what bounds it."""
