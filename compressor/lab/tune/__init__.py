"""Find the recipe: the smallest artifact within stated limits, proved."""
