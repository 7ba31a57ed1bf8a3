"""Shared memory, and rows out of it."""
