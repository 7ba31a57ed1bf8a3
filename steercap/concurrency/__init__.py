"""Event loops, threads, many things at once but not too many, and a sign of life from what takes long."""
