"""A backend of Triton's for CPU that compiles nothing: with TRITON_INTERPRET=1 every kernel runs in the interpreter.

vLLM takes Model Runner V2 on CPU where Triton names a backend for it. With this folder's parent on PYTHONPATH, Triton
finds this one as it finds any (the entry point beside it), in every process of an engine.
"""
