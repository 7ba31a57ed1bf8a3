"""`steercap doctor`: facts are gathered, checks judge them, and a command shows the results."""
