"""Kernels: the tap operator, registered once with an implementation per device, and codecs and sketches of rows."""
