"""Worker side of steercap: it tracks the tokens of each forward pass, stores their rows and reports on them."""
