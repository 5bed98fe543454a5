"""Carriers: the only place that knows a framework."""
