"""What `verify_gpu.py` checks, and the engines it checks it on."""
