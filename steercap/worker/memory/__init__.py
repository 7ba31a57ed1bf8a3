"""Shared memory, and the assembly of rows from it."""
