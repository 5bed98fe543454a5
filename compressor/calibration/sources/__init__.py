"""Data sources: batches of named arrays from files, image folders and users' functions."""
