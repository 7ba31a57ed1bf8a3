"""The Triton tap as the compiler sees it, without a GPU: its interpreter knows neither registers nor loops that carry values."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.specs import vector
from workers import CUDA, DEVICE, batch, known_schemas, rows_of, some_runtime, tap

from steercap import Ablate, Add, SteeringSpec
from steercap.core.messages import (
    Attach,
    Attached,
    Call,
    Collect,
    Configure,
    Configured,
    Owner,
    Placed,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.steering.lowering import lower, scopes_of
from steercap.testing.edits import edited

ARMED = {Point(0, "resid_post"): 0}

COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from steercap.kernels import triton_tap

kernel, width, dtype, deferred, together = json.loads(sys.argv[1])
kernel = getattr(triton_tap, kernel)
names = kernel.arg_names
pointers = dict(hidden=dtype, residual=dtype, weight=dtype, arena=dtype, responses="fp32", bank="fp32", checksums="i64")
strides = ("hidden_stride", "residual_stride", "num_points", "num_entries", "num_tokens")
block = 1 << (width - 1).bit_length()
most = 65504.0 if dtype == "fp16" else 2.0**40
line = 64 // (4 if dtype == "fp32" else 2)
constants = dict(WIDTH=width, BLOCK=block, LINE=line, BANK=width, HAS_RESIDUAL=deferred, TOKENS=together, EARLY=True, MOST=most, LOOK=dtype == "fp16", IDLE=False)
constants = {name: value for name, value in constants.items() if name in names}
kinds = {name: "*" + pointers.get(name, "i32") for name in names}
numbers = {"epsilon": "fp32"} if "epsilon" in names else {}
signature = kinds | dict.fromkeys(strides, "i32") | numbers | dict.fromkeys(constants, "constexpr")
even = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in (*constants, *strides[2:], *numbers)}
source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, even)
found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": min(max(block // 1024, 1), 16)})
print(json.dumps([found.asm["ttir"], found.asm["ptx"]]))
"""


TALLY = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from steercap.kernels.triton_accumulate import BLOCK, TILE, _accumulate_kernel

names = _accumulate_kernel.arg_names
constants = dict(WIDTH=4096, BLOCK=BLOCK, TILE=TILE, SLOTS=2, ARENA_LINE=32)
pointers = dict(updates="*i32", points="*i32", layouts="*i32", sums="*fp32", held="*bf16", arena="*bf16")
sizes = dict.fromkeys(("num_points", "sum_stride", "held_stride"), "i32")
even = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "sum_stride", "held_stride")}
signature = pointers | sizes | dict.fromkeys(constants, "constexpr")
source = ASTSource(_accumulate_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, even)
found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print(json.dumps([found.asm["ttir"], found.asm["ptx"]]))
"""


PROJECT = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from steercap.kernels.triton_rp import TOGETHER, _project_kernel

names = _project_kernel.arg_names
constants = dict(BLOCK=4096, TOKENS=TOGETHER)
pointers = dict(rows="*bf16", results="*fp32", bank="*fp32", bank_rows="*i64", records="*i64", points="*i64")
sizes = dict.fromkeys(("count", "directions", "WIDTH", "ROW_LINE", "RESULT_LINE", "BANK"), "i32")
signature = pointers | sizes | dict.fromkeys(constants, "constexpr")
even = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *list(sizes)[2:])}
source = ASTSource(_project_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, even)
found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(json.dumps([found.asm["ptx"], found.metadata.shared]))
"""


def test_the_projection_compiles_for_hopper() -> None:
    """Rows and directions are read 16 bytes a thread, and a row stays in registers: none is spilled to local memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROJECT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ptx, _ = json.loads(done.stdout)
    assert "ld.global.v4.b32" in ptx
    assert "ld.local" not in ptx


def test_the_accumulation_compiles_for_hopper() -> None:
    """Rows of a pass are read 8 bytes a thread at least, sums 16; greatest, sum and what it lost go through the loop."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", TALLY], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ttir, ptx = json.loads(done.stdout)
    (loop,) = [line for line in ttir.splitlines() if "scf.for" in line]
    assert loop.partition("-> (")[2].count("tensor<") == 3, loop
    assert "st.global.v4.b32" in ptx
    assert "ld.global.v2.b32" in ptx or "ld.global.v4.b32" in ptx


@pytest.mark.parametrize(
    ("kernel", "width", "dtype", "deferred", "together"),
    [
        ("_tap_kernel", 128, "fp32", False, 1),
        ("_tap_kernel", 4096, "bf16", True, 1),
        ("_tap_kernel", 4096, "bf16", True, 8),
        ("_tap_kernel", 5120, "fp16", True, 1),
        ("_tap_kernel", 16384, "bf16", True, 8),
        ("_tap_norm_kernel", 4096, "bf16", True, 1),
        ("_tap_norm_kernel", 5120, "fp16", True, 1),
    ],
)
@pytest.mark.slow
def test_the_tap_compiles_for_hopper(kernel, width, dtype, deferred, together) -> None:
    """Rows are read and written 16 bytes at a time; the row that joined entries read is carried through the loop by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([kernel, width, dtype, deferred, together])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ttir, ptx = json.loads(done.stdout)
    loop = [line for line in ttir.splitlines() if "scf.for" in line][-1]
    carried = loop.partition("-> (")[2]
    assert carried.count("tensor<") == 3, loop  # the row, what is written next, the row at the start
    assert "%start" in loop
    assert "griddepcontrol.wait" in ptx
    assert "st.global.v4.b32" in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx


@pytest.mark.parametrize("width", [128, 576, 5120, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])])
def test_rows_of_every_width_are_edited_and_copied(width, dtype) -> None:
    """On the device, or interpreted: captured rows are those of the formulas, rounded once; what is not tracked is left."""
    edits = [Add(vector(width, seed=1), layer=0), Ablate(vector(width, seed=2), layer=0, tokens=[1, 2])]
    ready = lower(
        SteeringSpec(edits, preserve_norm=True), armed=ARMED, schemas=known_schemas(ARMED, width, 1), num_layers=1,
        edits_per_point=8,
    )  # fmt: skip
    runtime = some_runtime("cuda", 1, width, dtype, slots=1, bank_rows=2, tokens=8, device_ring_bytes=8 * width * 4)
    assert isinstance(decode_answer(runtime.answer(encode(Call((), Attach(8 << 20))))), Attached)
    places = ((0,), (1,))
    vectors = tuple(
        Vectors(b.digest, p, ready.vectors[b.digest]) for b, p in zip(ready.configuration.blobs, places, strict=True)
    )
    placed = (Placed(0, ready.configuration, places),)
    assert decode_answer(runtime.answer(encode(Call((), Configure(vectors, placed))))) == Configured(())
    scopes, replaced = scopes_of(ready, 3, 3)
    steering = SteeringPlan(0, ready.configuration.digest, b"", scopes, replaced)
    capture = CapturePlan((0,), (Range(0, None),), None, RAW)
    runtime.register("r", Plan("r", 3, 3, capture=capture, steering=steering).encode(), 0)
    hidden, residual = (vector(5, width, seed=seed).to(dtype).to(DEVICE) for seed in (3, 4))
    stream, untouched = (hidden.float() + residual.float()).cpu(), hidden[3:].clone()
    runtime.begin_step(batch("cuda", ["r", "other"], [0, 0], [3, 2], range(5), [0, 1, 2, 0, 1]))
    tap(runtime, hidden, residual, 0)
    runtime.end_step()
    (captured_rows,) = decode_answer(runtime.answer(encode(Call((), Collect((Wanted(Owner("r", 0), 3),)))))).shares
    assert captured_rows.failure is None
    (rows,) = rows_of(runtime, captured_rows)
    known = edited(SteeringSpec(edits, preserve_norm=True), Point(0, "resid_post"), stream[:3], 3, 1)
    error = (rows.double() - known).abs() / known.abs().clamp(min=1e-3)
    assert error.max() < {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert torch.equal(rows, hidden[:3].cpu())
    assert torch.equal(hidden[3:], untouched)


def test_a_large_pass_takes_several_tokens_a_program() -> None:
    """The last program's tokens end before its last place; tracked and untracked tokens share programs."""
    tokens, width = 1051, 128
    runtime = some_runtime("cuda", 1, width, tokens=tokens + 5, device_ring_bytes=tokens * width * 4)
    assert isinstance(decode_answer(runtime.answer(encode(Call((), Attach(8 << 20))))), Attached)
    capture = CapturePlan((0,), (Range(2, 4), Range(700, None)), None, RAW)
    runtime.register("r", Plan("r", 1000, 1000, capture=capture).encode(), 0)
    hidden = vector(tokens, width, seed=0).to(DEVICE)
    positions = [*range(51), *range(1000)]
    runtime.begin_step(batch("cuda", ["other", "r"], [0, 0], [51, 1000], range(tokens), positions))
    tap(runtime, hidden, None, 0)
    runtime.end_step()
    (captured_rows,) = decode_answer(runtime.answer(encode(Call((), Collect((Wanted(Owner("r", 0), 1000),)))))).shares
    assert captured_rows.failure is None
    (rows,) = rows_of(runtime, captured_rows)
    assert torch.equal(rows, hidden[51:][[2, 3, *range(700, 1000)]].cpu())
