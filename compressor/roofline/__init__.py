"""Where a model's time goes, and what bounds it: roofline, operator times, Amdahl's law."""
