"""Factorisation of layers into products of smaller ones."""
