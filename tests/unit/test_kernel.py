"""The Triton tap as the compiler sees it, without a GPU: its interpreter knows neither registers nor loops that carry values."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from steercap.kernels.triton_tap import _tap_kernel

width, dtype, deferred = json.loads(sys.argv[1])
pointers = dict(hidden=dtype, residual=dtype, arena=dtype, responses="fp32", bank="fp32", evidence="i64")
strides = ("hidden_stride", "residual_stride", "num_points", "num_entries")
block = 1 << (width - 1).bit_length()
constants = dict(WIDTH=width, BLOCK=block, HAS_RESIDUAL=deferred)
names = _tap_kernel.arg_names
kinds = {name: "*" + pointers.get(name, "i32") for name in names}
signature = kinds | dict.fromkeys(strides, "i32") | dict.fromkeys(constants, "constexpr")
even = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in (*constants, *strides[2:])}
source = ASTSource(_tap_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, even)
found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": min(max(block // 1024, 1), 16)})
print(json.dumps([found.asm["ttir"], found.asm["ptx"]]))
"""


@pytest.mark.parametrize(
    ("width", "dtype", "deferred"),
    [(128, "fp32", False), (4096, "bf16", True), (5120, "fp16", True), (16384, "bf16", True)],
)
def test_the_tap_compiles_for_hopper(width, dtype, deferred) -> None:
    """Rows are read and written 16 bytes at a time; the row that joined entries read is carried through the loop by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([width, dtype, deferred])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ttir, ptx = json.loads(done.stdout)
    (loop,) = [line for line in ttir.splitlines() if "scf.for" in line]
    carried = loop.partition("-> (")[2]
    assert carried.count("tensor<") == 2, loop
    assert "%start" in loop
    assert "st.global.v4.b32" in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx
