"""Graph fusion: fewer, larger operators that compute the same."""
