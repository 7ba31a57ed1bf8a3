"""Beside the model: what becomes of each token of a pass, where its rows go, and what became of them."""
