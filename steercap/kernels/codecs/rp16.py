"""Random projections with 16 bits a number."""

from steercap.kernels.codecs.random_projection import RandomProjection

MEMBER = RandomProjection(16)
