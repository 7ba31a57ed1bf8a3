"""A platform plug-in of vLLM's, loaded in each of its processes, without which its Ray executor does not run on CPU.

vLLM's platform for CPU names no resource of Ray's (`ray_device_key` is empty), and its executor refuses to start. Here
a worker takes what Ray counts as a GPU, which a node of Ray's may be told to have. And vLLM lets ranks on CPU talk
through shared memory if they agree on a port, which ranks on several machines do as well: here they use gloo.
"""

from __future__ import annotations


def platform() -> str:
    """The platform's class, for vLLM."""
    return f"{__name__}.platform_class.RayCpuPlatform"
