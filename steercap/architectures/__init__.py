"""Where rows are in a model: sites, families of layers, the decoder found in a loaded model."""
