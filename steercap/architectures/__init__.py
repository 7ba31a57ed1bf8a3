"""Model architectures: sites, families of decoder layers, and the decoder of a loaded model."""
