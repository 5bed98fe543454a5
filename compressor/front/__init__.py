"""The library's functions: what the package offers to Python programs."""
