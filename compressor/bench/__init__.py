"""Artifacts side by side: latency, throughput, cold start, memory and energy."""
