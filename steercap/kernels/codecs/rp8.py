"""Codec of random projections with 8 bits per number."""

from steercap.kernels.codecs.random_projection import RandomProjection

MEMBER = RandomProjection(8)
