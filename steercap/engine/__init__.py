"""One engine's life on the client: what it has room for, what its workers hold, and how rows are fetched."""
