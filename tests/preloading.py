"""What the fork server of `preloaded.py` does once, behind its imports, so that none of its copies has to."""

from __future__ import annotations

import gc

import torch
from torch._inductor.codecache import torch_key, triton_key
from vllm.v1.sample.ops.logprobs import batched_count_greater_than

# Digests of all files of torch and Triton, which are part of the name of whatever is compiled: a second.
torch_key()
triton_key()
# What counts ranks is compiled in eager engines too, and before it, which instructions the compiler here has is tried
# in processes.
with torch.inference_mode():
    for rows, width in ((2, 256), (3, 512), (1, 256), (1, 512)):
        batched_count_greater_than(torch.rand(rows, width), torch.rand(rows, 1))
# A collection of garbage goes through all that is imported, which takes 0.7 s; vLLM makes several in each process.
gc.collect()
gc.freeze()
