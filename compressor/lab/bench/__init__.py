"""Latency, throughput, memory and energy of artifacts, side by side."""
