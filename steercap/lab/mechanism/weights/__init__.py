"""Weights of a model, read from its checkpoint a tensor at a time, and what its blocks do with a row."""
