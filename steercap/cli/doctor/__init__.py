"""`steercap doctor`: facts are gathered, checks judge them, a command shows what they say."""
