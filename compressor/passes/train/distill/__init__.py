"""``distill``: learning from a teacher."""
