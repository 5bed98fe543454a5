"""Render a report for people."""
