"""Worker side of the taps: their tables and rows, one module for each kind of device."""
