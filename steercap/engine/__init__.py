"""One engine's life on the client: admission, compilation, calls of the workers, and fetching and spilling of rows."""
