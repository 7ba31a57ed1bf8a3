"""Studies of steering on many prompts: dose sweeps, and comparisons of methods."""
