"""The tap: one operator, registered once, with an implementation for each kind of device."""
