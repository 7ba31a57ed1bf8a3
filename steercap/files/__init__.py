"""Files, each of which appears whole or not at all."""
