"""Stages of a run, one file each, in the order generate, score, filter, capture, vectors."""
