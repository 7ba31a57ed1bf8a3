"""Mechanistic interpretability: patching, analysis of vectors, model weights, views of rows."""
