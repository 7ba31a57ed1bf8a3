"""Random projections with 8 bits a number."""

from steercap.kernels.codecs.random_projection import RandomProjection

MEMBER = RandomProjection(8)
