"""Experiments: many ways of steering in one engine, with the controls that say what they are worth."""
