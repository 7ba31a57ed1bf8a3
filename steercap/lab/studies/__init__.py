"""Steering tried on many prompts: sweeps of doses, and methods beside each other."""
