"""Latency and cold starts, measured side by side."""
