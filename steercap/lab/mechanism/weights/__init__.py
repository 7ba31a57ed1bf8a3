"""Weights of a model, read from its checkpoint a tensor at a time, as linear maps of the stream."""
