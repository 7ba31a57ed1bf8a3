"""What the fork server of `preloaded.py` does once, behind its imports, so that none of its copies has to."""

from __future__ import annotations

import gc

from torch._inductor.codecache import torch_key, triton_key

# Digests of all files of torch and Triton, which are part of the name of whatever is compiled: a second.
torch_key()
triton_key()
# A collection of garbage goes through all that is imported, which takes 0.7 s; vLLM makes several in each process.
gc.collect()
gc.freeze()
