"""Kernels: the tap operator, registered once with an implementation per device, and the codecs of rows."""
