"""Event loops, threads, and many things at once but not too many."""
