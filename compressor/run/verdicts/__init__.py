"""What measurements say: statistics of comparisons, decisions, doubts and verdicts."""
