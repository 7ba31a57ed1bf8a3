"""One request on the client: from what was asked to its handles."""
