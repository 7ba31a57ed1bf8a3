"""The tap in Triton, as it runs on CUDA in eager mode, under torch.compile and inside CUDA graphs.

A program handles one token, or a few: it reads the tokens' instructions from the tables, and ends if there are none.
Otherwise the row is read once, edited in float32 registers, written back if it changed, and copied to the arena. All
inputs are tables at fixed addresses, so a replayed graph follows the current step's instructions. Where a norm reads
the stream next, one program per token does both.

`kernels.reference` does the same in PyTorch; the tests compare the two.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from triton.runtime import driver

from steercap.core.program import HOLE
from steercap.kernels import bits
from steercap.kernels.bits import (
    BEFORE,
    LAYOUT,
    LINE,
    MASK,
    REPLACED,
    REPORT,
    SLOT,
    TOKEN_COLUMNS,
    edited_most,
    overflows_later,
)

#: Number of integer columns of an entry, and their indices; the entry's floats are in a table of their own.
ENTRY_COLUMNS: Final = 8
KIND, SCOPE, WRITE, READ, REPLACEMENT = range(5)
#: Number of floats of an entry, `core.program.RESPONSE_NUMBERS`.
RESPONSE_COLUMNS: Final = 8
#: Number of columns of a token's report: input token id, position, checksums of its edits and its copies.
REPORT_COLUMNS: Final = 4

_TOKEN_COLUMNS = tl.constexpr(TOKEN_COLUMNS)
_SLOT, _MASK, _LINE, _LAYOUT = tl.constexpr(SLOT), tl.constexpr(MASK), tl.constexpr(LINE), tl.constexpr(LAYOUT)
_BEFORE, _REPLACED, _REPORT = tl.constexpr(BEFORE), tl.constexpr(REPLACED), tl.constexpr(REPORT)
_ENTRY_COLUMNS = tl.constexpr(ENTRY_COLUMNS)
_KIND, _SCOPE, _WRITE, _READ = tl.constexpr(KIND), tl.constexpr(SCOPE), tl.constexpr(WRITE), tl.constexpr(READ)
_REPLACEMENT = tl.constexpr(REPLACEMENT)
_REPORT_COLUMNS = tl.constexpr(REPORT_COLUMNS)
_RESPONSE_COLUMNS = tl.constexpr(RESPONSE_COLUMNS)
_NOT_FINITE = tl.constexpr(bits.NOT_FINITE)
_SPREAD, _MIX = tl.constexpr(bits.SPREAD), tl.constexpr(bits.MIX)
_PRIME, _FOLD, _ROUNDS = tl.constexpr(bits.PRIME), tl.constexpr(bits.FOLD), tl.constexpr(bits.ROUNDS)
_READS, _RELATIVE, _REPLACES = tl.constexpr(bits.READS), tl.constexpr(bits.RELATIVE), tl.constexpr(bits.REPLACES)
_HOLE = tl.constexpr(HOLE)
_JOINED, _LEADS = tl.constexpr(bits.JOINED), tl.constexpr(bits.LEADS)
_MEASURES, _RESTORES = tl.constexpr(bits.MEASURES), tl.constexpr(bits.RESTORES)
#: Triton's eviction policy that keeps the tables in the cache while a layer's weights pass through it.
_STAY = tl.constexpr("evict_last")


@triton.jit(do_not_specialize=["num_tokens"])
def _tap_kernel(
    hidden, residual, point, tokens, counts, entries, responses, bank, replacements, arena, layouts, checksums,
    hidden_stride, residual_stride, num_points, num_entries, num_tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, BANK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr, MOST: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Edit and copy the rows of `TOKENS` tokens at one point.

    An arena line has `LINE` elements, a bank row `BANK`.

    With `EARLY` it is launched while the previous kernel still runs. The tables were written before that kernel began,
    so they are read at once; the stream is accessed after its end, and no program exits before.
    """
    first = tl.program_id(0) * TOKENS
    some = first + tl.arange(0, TOKENS)
    inside_pass = some < num_tokens
    slots = tl.load(tokens + some * _TOKEN_COLUMNS + _SLOT, mask=inside_pass, other=-1, eviction_policy=_STAY)
    lines = tl.load(tokens + some * _TOKEN_COLUMNS + _LINE, mask=inside_pass, other=-1, eviction_policy=_STAY)
    if tl.max(tl.maximum(slots, lines), 0) < 0:
        if EARLY:
            tl.extra.cuda.gdc_wait()
    else:
        for number in range(TOKENS):
            _tap_token(
                first + number, hidden, residual, point, tokens, counts, entries, responses, bank, replacements, arena,
                layouts, checksums, hidden_stride, residual_stride, num_points, num_entries, num_tokens, hidden, 0.0,
                WIDTH, BLOCK, LINE, BANK, HAS_RESIDUAL, EARLY, MOST, LOOK, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _tap_norm_kernel(
    hidden, residual, weight, point, tokens, counts, entries, responses, bank, replacements, arena, layouts, checksums,
    hidden_stride, residual_stride, num_points, num_entries, num_tokens, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, BANK: tl.constexpr,
    EARLY: tl.constexpr, MOST: tl.constexpr, LOOK: tl.constexpr, IDLE: tl.constexpr,
):  # fmt: skip
    """Edit and copy the row of one token at one point, then add and norm it.

    Each token has a program, since the norm is computed in every pass. With `IDLE` only that is done, and no table is
    read.
    """
    token = tl.program_id(0)
    if IDLE:
        columns = tl.arange(0, BLOCK)
        inside = columns < WIDTH
        stream = hidden + token.to(tl.int64) * hidden_stride + columns
        deferred = residual + token.to(tl.int64) * residual_stride + columns
        scale = tl.load(weight + columns, mask=inside, other=0.0, eviction_policy=_STAY)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        row = tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        row += tl.load(deferred, mask=inside, other=0.0).to(tl.float32)
        _store_norm(row, scale, stream, deferred, inside, epsilon, WIDTH)
    else:
        _tap_token(
            token, hidden, residual, point, tokens, counts, entries, responses, bank, replacements, arena,
            layouts, checksums, hidden_stride, residual_stride, num_points, num_entries, num_tokens, weight, epsilon,
            WIDTH, BLOCK, LINE, BANK, True, EARLY, MOST, LOOK, True,
        )  # fmt: skip


@triton.jit
def _tap_token(  # noqa: PLR0915 -- all that is known early is read early
    token, hidden, residual, point, tokens, counts, entries, responses, bank, replacements, arena, layouts, checksums,
    hidden_stride, residual_stride, num_points, num_entries, num_tokens, weight, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr, BANK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr, MOST: tl.constexpr, LOOK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Edit and copy the row of one token at one point.

    With `LOOK`, rows of steered tokens are checked for overflow at points without edits too; see `kernels.bits`. With
    `NORMS`, the row is written to `residual` and its norm to `hidden`, as `kernels.reference.add_norm` does.
    """
    asked = tokens + token * _TOKEN_COLUMNS
    known = token < num_tokens
    slot = tl.load(asked + _SLOT, mask=known, other=-1, eviction_policy=_STAY)
    line = tl.load(asked + _LINE, mask=known, other=-1, eviction_policy=_STAY)
    # Loaded together, since each load takes as long as all of them.
    layout = tl.load(asked + _LAYOUT, mask=known, other=-1, eviction_policy=_STAY)
    scopes = tl.load(asked + _MASK, mask=known, other=0, eviction_policy=_STAY)
    before = tl.load(asked + _BEFORE, mask=known, other=-1, eviction_policy=_STAY)
    replaced = tl.load(asked + _REPLACED, mask=known, other=-1, eviction_policy=_STAY)
    at = tl.load(point, eviction_policy=_STAY)
    offset = tl.load(layouts + layout * num_points + at, mask=line >= 0, other=-1, eviction_policy=_STAY)
    count = tl.load(counts + slot * num_points + at, mask=slot >= 0, other=0, eviction_policy=_STAY)
    program = (tl.maximum(slot, 0) * num_points + at).to(tl.int64) * num_entries
    entry, response = entries + program * _ENTRY_COLUMNS, responses + program * _RESPONSE_COLUMNS
    kind = tl.load(entry + _KIND, eviction_policy=_STAY)
    scope = tl.load(entry + _SCOPE, eviction_policy=_STAY)
    written = tl.load(entry + _WRITE, eviction_policy=_STAY)
    length = tl.load(response + 2, eviction_policy=_STAY)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    stream = hidden + token.to(tl.int64) * hidden_stride + columns
    deferred = residual + token.to(tl.int64) * residual_stride + columns
    if NORMS:
        scale = tl.load(weight + columns, mask=inside, other=0.0, eviction_policy=_STAY)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    # Load the row, in case it is wanted at this point, while the loads from the tables are still under way.
    some = inside
    if not NORMS:
        some = columns < tl.where(tl.maximum(slot, line) >= 0, WIDTH, 0)
    first_part = tl.load(stream, mask=some, other=0.0)
    other_part = first_part
    if HAS_RESIDUAL:
        other_part = tl.load(deferred, mask=some, other=0.0)
    write = tl.load(
        bank + written.to(tl.int64) * BANK + columns, mask=columns < tl.where(count > 0, WIDTH, 0), other=0.0
    )
    edits = count > 0
    if LOOK:
        edits = slot >= 0
    works = (offset >= 0) | edits
    if NORMS:
        row = first_part.to(tl.float32) + other_part.to(tl.float32)
    if works:
        if not NORMS:
            row = first_part.to(tl.float32)
            if HAS_RESIDUAL:
                row += other_part.to(tl.float32)
        target = arena + (line + offset).to(tl.int64) * LINE + columns
        checksum = checksums + token * 2
        value = _weight(at.to(tl.int64))
        if offset >= 0:
            tl.atomic_add(checksum + 1, value, sem="relaxed")
            if before > 0:
                _copy(row, target, inside, checksum + 1, at)
        if edits:
            edited, applied = _edit(
                row, columns, inside, scopes, replaced, count, kind, scope, write, length,
                entry, response, bank, replacements, WIDTH, BANK,
            )  # fmt: skip
            within = (tl.abs(edited) <= MOST) | (columns >= WIDTH)  # not so of NaN
            change = tl.max(tl.where(within, (edited != row).to(tl.int32), 2), 0)
            edited = tl.where(change > 1, 0.0, edited)
            if change > 1:
                _mark_not_finite(checksum, at)
            if NORMS:
                # The norm reads an edited row as it is kept, rounded, and any other one as the sum that it is.
                edited = tl.where(change > 0, edited.to(hidden.dtype.element_ty).to(tl.float32), edited)
            elif change > 0:
                tl.store(stream, edited.to(hidden.dtype.element_ty), mask=inside)
                if HAS_RESIDUAL:
                    tl.store(deferred, tl.zeros_like(row).to(residual.dtype.element_ty), mask=inside)
            tl.atomic_add(checksum, applied.to(tl.int64) * value, sem="relaxed")
            row = edited
        if (offset >= 0) & (before <= 0):
            _copy(row, target, inside, checksum + 1, at)
    if NORMS:
        _store_norm(row, scale, stream, deferred, inside, epsilon, WIDTH)


@triton.jit
def _store_norm(row, scale, stream, deferred, inside, epsilon, WIDTH: tl.constexpr):
    """Write a row to the residual, and its RMSNorm to the stream, as `kernels.reference.add_norm` does."""
    tl.store(deferred, row.to(deferred.dtype.element_ty), mask=inside)
    unit = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    tl.store(stream, (unit * scale.to(tl.float32)).to(stream.dtype.element_ty), mask=inside)


@triton.jit
def _weight(point):
    """Return the weight of a point in checksums, see `kernels.bits.weight`."""
    mixed = (point + 1) * _SPREAD % _PRIME
    for _ in tl.static_range(_ROUNDS):
        mixed = (mixed ^ (mixed >> _FOLD)) * _MIX % _PRIME
    return mixed + 1


@triton.jit
def _norm(row):
    """Return the Euclidean norm of a row without overflow of squares; NaN if an element is NaN or infinite."""
    greatest = tl.max(tl.abs(row), 0)
    part = row / tl.where(greatest > 0, greatest, 1.0)
    return greatest * tl.sqrt(tl.sum(part * part, 0))


@triton.jit
def _copy(row, target, inside, checksum, at):
    """Copy a row to the arena, and mark the point in the checksum if the row is not finite."""
    rounded = row.to(target.dtype.element_ty)
    tl.store(target, rounded, mask=inside)
    if tl.max(tl.where(tl.abs(rounded.to(tl.float32)) < float("inf"), 0, 1), 0) > 0:
        _mark_not_finite(checksum, at)


@triton.jit
def _mark_not_finite(checksum, at):
    """Add `(point + 1) * _NOT_FINITE` to a checksum, unless an earlier point of the token has done so."""
    if tl.load(checksum) < _NOT_FINITE:
        tl.atomic_add(checksum, (at.to(tl.int64) + 1) * _NOT_FINITE, sem="relaxed")


@triton.jit
def _edit(  # noqa: PLR0915 -- one loop, unrolled by one step
    row, columns, inside, scopes, replaced, count, kind, scope, write, constant,
    entries, responses, bank, replacements, WIDTH: tl.constexpr, BANK: tl.constexpr,
):  # fmt: skip
    """Apply the entries of one point to a row, in order; return the row and the number of entries applied.

    The first entry's columns are arguments; each next entry is loaded while the current one is applied.
    """
    # The row that joined entries read. Not `row` itself: Triton treats a second name of one value as constant.
    start = tl.zeros_like(row)
    norm = 0.0
    applied = count * 0
    for number in range(count):
        entry = entries + number * _ENTRY_COLUMNS
        response = responses + number * _RESPONSE_COLUMNS
        following = entries + tl.minimum(number + 1, count - 1) * _ENTRY_COLUMNS
        active = (scopes >> scope) & 1
        next_kind = tl.load(following + _KIND, eviction_policy=_STAY)
        next_scope = tl.load(following + _SCOPE, eviction_policy=_STAY)
        next_written = tl.load(following + _WRITE, eviction_policy=_STAY)
        if (kind & _MEASURES) != 0:
            norm = _norm(row)
        if ((kind & _LEADS) != 0) & ((kind & _JOINED) == 0):
            start = row
        if (kind & _REPLACES) != 0:
            source = replaced * 0 - 1
            if replaced >= 0:
                source = tl.load(replacements + replaced + tl.load(entry + _REPLACEMENT))
            if source < 0:
                active = active * 0
            if active != 0:
                given = tl.load(bank + source.to(tl.int64) * BANK + columns, mask=inside, other=0.0)
                row = tl.where(given == _HOLE, row, given)
        elif active != 0:
            length = constant
            if (kind & _READS) != 0:
                read = tl.load(bank + tl.load(entry + _READ).to(tl.int64) * BANK + columns, mask=inside, other=0.0)
                if (kind & _JOINED) != 0:
                    projection = tl.sum(start * read, 0)
                else:
                    projection = tl.sum(row * read, 0)
                projection += tl.load(response)
                reach = tl.maximum(projection, tl.load(response + 6))
                length += tl.load(response + 1) * reach
                length = tl.minimum(tl.maximum(length, tl.load(response + 4)), tl.load(response + 5))
                length -= tl.load(response + 3) * reach
                threshold = tl.load(response + 7)
                length = tl.where((projection <= threshold) & (threshold > -float("inf")), 0.0, length)
                length = tl.where(projection == projection, length, projection)  # bounds lose NaN
            if (kind & _RELATIVE) != 0:
                length *= _norm(row)
            row = row + length * write
        applied += active
        if (kind & _RESTORES) != 0:
            now = _norm(row)
            if now > 0:
                row = row * tl.div_rn(norm, now)  # 1 for equal norms; `/` is off by up to two units
        kind = next_kind
        scope = next_scope
        more = count > number + 1
        write = tl.load(
            bank + next_written.to(tl.int64) * BANK + columns, mask=columns < tl.where(more, WIDTH, 0), other=0.0
        )
        constant = tl.load(response + _RESPONSE_COLUMNS + 2, mask=more, other=0.0)
    return row, applied


#: Compiled closing kernel, by the properties of its arguments: Triton's own lookup takes longer than a launch.
_compiled_closes: dict[tuple[object, ...], Any] = {}
_CLOSE_BLOCK: Final = 128
_ALIGNED: Final = 16  # bytes; Triton compiles addresses that are multiples of it apart


@triton.jit(do_not_specialize=["first", "count", "stays", "moved"])
def _close_kernel(tokens, checksums, reports, token_ids, positions, first, count, stays, moved, BLOCK: tl.constexpr):
    """Write a report of each token of a pass; then make the tables idle, or advance them to the next pass."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    asked = tokens + token * _TOKEN_COLUMNS
    row = tl.load(asked + _REPORT, mask=inside, other=-1)
    known = row >= 0
    said = reports + (first + row).to(tl.int64) * _REPORT_COLUMNS
    tl.store(said, tl.load(token_ids + token, mask=known, other=0).to(tl.int64), mask=known)
    tl.store(said + 1, tl.load(positions + token, mask=known, other=0).to(tl.int64), mask=known)
    tl.store(said + 2, tl.load(checksums + token * 2, mask=known, other=0), mask=known)
    tl.store(said + 3, tl.load(checksums + token * 2 + 1, mask=known, other=0), mask=known)
    tl.store(checksums + token * 2, tl.zeros_like(token).to(tl.int64), mask=inside)
    tl.store(checksums + token * 2 + 1, tl.zeros_like(token).to(tl.int64), mask=inside)
    if stays != 0:
        line = tl.load(asked + _LINE, mask=inside, other=-1)
        tl.store(asked + _LINE, line + moved, mask=line >= 0)
    else:
        for column in tl.static_range(_TOKEN_COLUMNS):
            tl.store(asked + column, tl.zeros_like(token) - 1, mask=inside)


class TapLauncher:
    """Launcher of the tap kernels over rows of one width and dtype, with its tables.

    Triton's lookup of a compiled kernel takes longer than the rest of a launch, so it is done once for each combination
    of dtypes, strides and alignments.

    Args:
        tokens: instructions for each token, int32; columns from `bits.LAYOUT` on.
        counts: number of entries of each slot at each point, int32.
        entries: integer columns of the entries, int32; columns from `KIND` on.
        responses: float columns of the entries, float32, in the order of `core.program.RESPONSE_NUMBERS`.
        bank: the vector bank, float32, cut to the width.
        replacements: bank row that each replacement puts in place of a token's row, -1 for none: int32.
        arena: ring buffer to which rows are copied, rounded to its dtype, in lines of `LINE_BYTES`.
        layouts: line offset of each point in a record, -1 if it is not captured, int32.
        checksums: checksums of each token's edits and copies, int64, updated; see `kernels.bits.weight`.
    """

    def __init__(
        self,
        tokens: Int[torch.Tensor, "most columns"],
        counts: Int[torch.Tensor, "slots points"],
        entries: Int[torch.Tensor, "slots points entries columns"],
        responses: Float[torch.Tensor, "slots points entries 8"],
        bank: Float[torch.Tensor, "vectors width"],
        replacements: Int[torch.Tensor, " replaced"],
        arena: Float[torch.Tensor, "lines line"],
        layouts: Int[torch.Tensor, "layouts points"],
        checksums: Int[torch.Tensor, "most 2"],
    ) -> None:
        self._tables = tokens, counts, entries, responses, bank, replacements, arena, layouts, checksums
        self._sizes = layouts.shape[1], entries.shape[2]
        self._lines = arena.shape[1], bank.stride(0)
        self._early = _can_be_early()
        self._compiled: dict[tuple[object, ...], Any] = {}  # None in Triton's interpreter

    def launch(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"] | None,
        point: Int[torch.Tensor, " 1"],
        *,
        idle: bool,
    ) -> None:
        """Launch the tap at one point: edit steered rows in place, and copy captured ones.

        Args:
            hidden, residual: summands of the rows; edited rows are written to `hidden`, and their `residual` is zeroed.
            point: index of the point among this rank's, int32 [1].
            idle: True if the tables have no instructions. The kernel is then launched only if it is not compiled yet,
                or into a CUDA graph that is being captured, which will run with other tables.
        """
        num_tokens, width = hidden.shape
        other = hidden if residual is None else residual
        strides = hidden.stride(0), other.stride(0)
        together = 1 if num_tokens <= MANY_TOKENS else TOGETHER
        has_residual = residual is not None
        addresses = (values.data_ptr() % _ALIGNED for values in (hidden, other, point))
        key = hidden.dtype, other.dtype, width, strides, together, has_residual, *addresses
        if idle and key in self._compiled and not _captures(hidden):
            return
        block = triton.next_power_of_2(width)
        arguments = (
            hidden, other, point, *self._tables, *strides, *self._sizes, num_tokens, width, block, *self._lines,
            has_residual, together, self._early, edited_most(hidden.dtype), overflows_later(hidden.dtype),
        )  # fmt: skip
        self._run(_tap_kernel, key, triton.cdiv(num_tokens, together), block, arguments)

    def launch_norm(
        self,
        hidden: Float[torch.Tensor, "n width"],
        residual: Float[torch.Tensor, "n width"],
        weight: Float[torch.Tensor, " width"],
        point: Int[torch.Tensor, " 1"],
        epsilon: float,
        *,
        idle: bool,
    ) -> None:
        """Launch the tap and the following sum and norm at one point; arguments as of `kernels.tap.tap_norm`.

        Args:
            idle: as for `launch`; the norm is computed even so.
        """
        num_tokens, width = hidden.shape
        strides = hidden.stride(0), residual.stride(0)
        given = hidden, residual, weight, point
        key = ("norm", width, strides, *((values.dtype, values.data_ptr() % _ALIGNED) for values in given))
        only_norms = idle and key in self._compiled and not _captures(hidden)
        block = triton.next_power_of_2(width)
        arguments = (
            *given, *self._tables, *strides, *self._sizes, num_tokens, epsilon, width, block, *self._lines,
            self._early, edited_most(hidden.dtype), overflows_later(hidden.dtype), only_norms,
        )  # fmt: skip
        self._run(_tap_norm_kernel, ("idle", *key) if only_norms else key, num_tokens, block, arguments)

    def _run(self, kernel: Any, key: tuple[object, ...], programs: int, block: int, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel with `programs` programs; its first launch for a key compiles it."""
        if (compiled := self._compiled.get(key)) is not None:
            _launch(compiled, arguments[0].device, programs, arguments)
            return
        early = {"launch_pdl": True} if self._early else {}
        self._compiled[key] = kernel[programs, 1, 1](*arguments, num_warps=_warps(block), **early)


def stream_handle(device: torch.device) -> int:
    """Return the handle of the current CUDA stream of a device."""
    handle: int = driver.active.get_current_stream(device.index)
    return handle


def _launch(compiled: Any, device: torch.device, programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on the device's current stream.

    `compiled[grid]` does the same more slowly, since it looks up the device and hooks of Triton's profilers, which do
    not see these launches.
    """
    stream = stream_handle(device)
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


#: Number of elements of a row per warp of 32 threads.
WARP_ELEMENTS: Final = 512
#: Maximum number of tokens of a CUDA graph by vLLM's default; and number of tokens per program in larger passes.
MANY_TOKENS: Final = 512
TOGETHER: Final = 8


def _captures(values: torch.Tensor) -> bool:
    """Check if a CUDA graph is being captured on the current stream; False for a CPU tensor."""
    return values.is_cuda and torch.cuda.is_current_stream_capturing()


def _warps(block: int) -> int:
    return min(max(block // WARP_ELEMENTS, 1), 16)


@functools.cache
def _can_be_early() -> bool:
    """Check if the device can start a kernel before the previous one ends (compute capability 9.0 or higher)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch_close(
    tokens: Int[torch.Tensor, "most columns"],
    checksums: Int[torch.Tensor, "most 2"],
    reports: Int[torch.Tensor, "rows columns"],
    token_ids: Int[torch.Tensor, " n"],
    positions: Int[torch.Tensor, " n"],
    first: int,
    count: int,
    moved: int | None = None,
) -> None:
    """Write a report of each of the first `count` tokens of a pass, and reset the tables for the next pass.

    Args:
        tokens, checksums: as for `TapLauncher`.
        reports: table of reports, int64: input token id, position, checksums of edits and copies; on the device or in
            pinned host memory.
        token_ids, positions: the model's inputs for each token.
        first: row of `reports` for the first token.
        count: number of tokens of the pass, without padding.
        moved: number of lines by which to advance the rows' destinations, keeping all other instructions for the next
            pass; None to make the tables idle.
    """
    programs, stays = -(-count // _CLOSE_BLOCK), moved is not None
    read = token_ids.data_ptr(), positions.data_ptr()
    key = tokens.device, token_ids.dtype, positions.dtype, read[0] % _ALIGNED, read[1] % _ALIGNED
    numbers = first, count, int(stays), moved or 0, _CLOSE_BLOCK
    if (compiled := _compiled_closes.get(key)) is not None:
        # By address: of a tensor, the launch would ask the driver.
        tables = tokens.data_ptr(), checksums.data_ptr(), reports.data_ptr()
        _launch(compiled, tokens.device, programs, (*tables, *read, *numbers))
    elif (
        compiled := _close_kernel[programs, 1, 1](tokens, checksums, reports, token_ids, positions, *numbers)
    ) is not None:
        _compiled_closes[key] = compiled  # None in Triton's interpreter
