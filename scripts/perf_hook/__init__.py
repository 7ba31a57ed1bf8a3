"""Looks into the workers of vLLM, of any script; see `sitecustomize`."""
