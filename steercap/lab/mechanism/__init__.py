"""Why a model says what it says: patching, what vectors are made of, weights, views of rows."""
