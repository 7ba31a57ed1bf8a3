"""Model architectures: sites, families of decoder layers, and the decoder found in a loaded model."""
