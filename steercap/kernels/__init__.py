"""Kernels: the tap operator, with an implementation per device, and codecs and sketches of rows."""
