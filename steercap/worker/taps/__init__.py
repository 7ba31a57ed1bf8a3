"""The worker's end of the taps: one file for each kind of device."""
