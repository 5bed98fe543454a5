"""The model behind every pass: carriers, the only place that knows a framework."""
