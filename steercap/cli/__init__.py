"""The command `steercap`."""
