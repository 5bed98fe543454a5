"""Execute a plan: passes, exports, verification, report."""
