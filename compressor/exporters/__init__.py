"""Artifact formats: each checks, predicts, writes and reopens one."""
