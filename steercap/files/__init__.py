"""Atomic file writes, resumable run folders, and fingerprints of models."""
