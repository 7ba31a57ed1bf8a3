"""Personas: from the description of a trait to its vector."""
