"""Handle of one request's captured rows, `CaptureHandle`."""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from steercap.captures import files, npz
from steercap.captures.experts import Experts, experts, logits_of
from steercap.captures.fetching import fetch_all, fetched_in_parts
from steercap.captures.lens import BEHIND, MOST_BYTES, Lens, point_of, unembed
from steercap.captures.lifecycle import Lifecycle, Source, Stage
from steercap.captures.rows import Captures, Coded, Featured, Found
from steercap.core.attention import AttentionRule
from steercap.core.chat import LEFT_OUT, MediaSpan, MessageSpan, types_at
from steercap.core.display import described, layers_by_site
from steercap.core.protocols import NonCopyable
from steercap.core.receipt import Receipt
from steercap.core.schema import ATTENTION, RAW
from steercap.core.spec import Point
from steercap.core.tokens import Tokens, TokenSelection, selected
from steercap.core.values import count_of, index_of, shown
from steercap.errors import InvalidRequest, InvalidSelection, InvalidSpec
from steercap.kernels.attention import Attending, AttentionSummary, RecordedAttention, pattern, summarised, summary_of
from steercap.kernels.codecs.coded import CodedRows

if TYPE_CHECKING:
    from steercap.captures.lens import TunedLens
    from steercap.steering.edits.inputs import Mark


#: Advice in the error of an attempted copy.
INSTEAD: Final = "its rows have one owner; use handle.save(path), and CaptureHandle.load(path) where it is needed"
#: Default maximum bytes of a whole attention pattern: 32 heads and 1,400 tokens.
PATTERN_BYTES: Final = 256 << 20
#: Default maximum number of rows of a chunk.
CHUNK_ROWS: Final = 128
#: Descriptions of the stages in `repr`; handles without rows are "released".
_STATES: Final = {
    **dict.fromkeys((Stage.KEPT, Stage.SPILLING, Stage.COMING), "not fetched"),
    **dict.fromkeys((Stage.SPILLED, Stage.RETURNING), "on disk"),
}


class CaptureHandle(NonCopyable, instead=INSTEAD):
    """Captured activations of one finished request, fetched on demand.

    The rows stay in the worker, or go to disk with overflow="spill", until `fetch()`, `release()`, garbage collection
    or the end of `async with handle:` frees them. Made by `SteerModel.generate`, `chat` and `read`, or read from a file
    by `load`. It cannot be copied or pickled, since its rows have one owner; `save` and `load` move it elsewhere.

    Attributes:
        request_id: name that steercap gave the request.
        model: path or name of the model, as it was opened.
        text: generated text; empty after `read`, which generates none.
        prompt_token_ids: token ids of the prompt.
        output_token_ids: generated token ids; the last one has no row, since it was never an input.
        points: captured points, layer by layer.
        num_layers: number of decoder layers of the model.
        messages: for `chat`, the span of positions of each message, or the reason why it has none.
        media: the spans of positions of the prompt that stand for pictures, sound or video.
        directions: with `project=`, the names of the directions that rows were projected on.
        marks: fingerprints of these directions, by layer; empty in files of older versions.
        attention_rules: attention rules of the layers whose queries and keys are captured.
        recorded_attention: most strongly attended tokens of each head by layer, if a server recorded these.
        lifecycle: state of the rows: in the worker, on disk, fetched or released.
        adapter: name of the request's LoRA adapter, "" without one and in files of older versions.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        text: str,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        points: Sequence[Point],
        num_layers: int,
        lifecycle: Lifecycle,
        messages: Sequence[MessageSpan] = (),
        media: Sequence[MediaSpan] = (),
        directions: Sequence[str] = (),
        marks: Mapping[int, Sequence[Mark]] = MappingProxyType({}),
        attention_rules: Mapping[int, AttentionRule] = MappingProxyType({}),
        recorded_attention: Mapping[int, RecordedAttention] = MappingProxyType({}),
        adapter: str = "",
    ) -> None:
        self.request_id: str = request_id
        self.model: str = model
        self.text: str = text
        self.prompt_token_ids: tuple[int, ...] = tuple(prompt_token_ids)
        self.output_token_ids: tuple[int, ...] = tuple(output_token_ids)
        self.points: tuple[Point, ...] = tuple(points)
        self.messages: tuple[MessageSpan, ...] = tuple(messages)
        self.media: tuple[MediaSpan, ...] = tuple(media)
        self.num_layers: int = num_layers
        self.directions: tuple[str, ...] = tuple(directions)
        self.marks: dict[int, tuple[Mark, ...]] = {layer: tuple(known) for layer, known in marks.items()}
        self.attention_rules: dict[int, AttentionRule] = dict(attention_rules)
        self.recorded_attention: dict[int, RecordedAttention] = dict(recorded_attention)
        self.lifecycle: Lifecycle = lifecycle
        self.adapter: str = adapter

    async def fetch(self) -> CaptureHandle:
        """Copy the rows to this process, and free them in the worker. A second call does nothing.

        Returns:
            This handle, whose `captures`, `positions`, `token_ids`, `token_types` and `receipt` can now be read.

        Raises:
            CaptureIncomplete: rows are missing or belong to another token, or rows moved to disk have changed there.
            CaptureNotFinite: rows hold NaN or infinity, and the spec was not made with `allow_nonfinite=True`.
            CaptureReleased: the handle was released before.
            EngineFailure: the engine has died or was closed.
            WrongEventLoop: the model was started in another event loop.
        """
        await fetch_all([self.lifecycle])
        return self

    async def chunks(self, rows: int = CHUNK_ROWS) -> AsyncGenerator[CaptureHandle, None]:
        """Yield the rows in order in small handles, for sequences that are larger than memory.

        The rows stay in the worker until this handle is released. Rows that are fetched already, moved to disk after
        their request, reduced to one, summarised (`attention=`), or held by a server come in one handle.

        Args:
            rows: maximum number of rows of a small handle, which is of the same request, fetched and labelled.

        Raises:
            InvalidRequest: `rows` is no whole number above 0, or another loop over `chunks` is reading the rows.
            CaptureIncomplete, CaptureNotFinite, CaptureReleased, EngineFailure: as for `fetch`; an engine that dies
                during the loop ends it, and `fetch` or another loop then recomputes the rows.
        """
        count = count_of(rows, "rows", wrong=InvalidRequest)
        async with aclosing(fetched_in_parts(self.lifecycle, count)) as parts:
            async for part in parts:
                yield holding(self, part)

    @property
    def fetched(self) -> bool:
        """True if the rows are in this process."""
        return self.lifecycle.stage is Stage.HERE

    @property
    def captures(self) -> Captures:
        """Captured rows, by layer or by (layer, site): tensors [rows, ...]; see `Captures`.

        Raises:
            CaptureNotFetched: before `fetch()`.
            CaptureReleased: after `release()`.
        """
        return self.lifecycle.require_here().captures

    @property
    def coded(self) -> Coded:
        """Rows in a lossy codec, undecoded, by layer or by (layer, site): codes and scales.

        Raises:
            CaptureNotFetched: before `fetch()`.
            CaptureReleased: after `release()`.
        """
        return self.captures.coded

    @property
    def features(self) -> Featured:
        """Most active SAE features of each row, by layer or by (layer, site), as `Features`; with `sae=`.

        Raises:
            CaptureNotFetched: before `fetch()`.
            CaptureReleased: after `release()`.
        """
        source = self.lifecycle.source
        return Featured(self.captures, source.encoders if isinstance(source, Source) else {})

    @property
    def receipt(self) -> Receipt:
        """Receipt of this capture, as the workers recorded it; raises as `captures` does."""
        return self.lifecycle.require_here().receipt

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence, or of each row that went into a reduction: int64 [rows], a copy."""
        return torch.from_numpy(self.receipt.positions.copy())

    @property
    def token_ids(self) -> torch.Tensor:
        """Token id that the model read at each of `positions`: int64 [rows], a copy."""
        return torch.from_numpy(self.receipt.token_ids.copy())

    @property
    def token_types(self) -> npt.NDArray[np.str_]:
        """Type of the input at each of `positions`, str [rows].

        "text" stands for a token; "image", "audio" or "video" for an embedding of such an input in a token's place.
        `handle.token_types == "image"` is a mask over the rows of this handle, and `handle.positions[mask]` the same
        tokens in any request. `handle.media` has the position span of each picture.
        """
        return types_at(self.media, self.receipt.positions)

    def rows_of(self, message: int | str) -> torch.Tensor:
        """Return a mask of the rows that belong to a message of a `chat`: bool [rows].

        Use it as `handle.captures[4][mask]`, and as `tokens=handle.positions[mask]` of another request.

        Args:
            message: index of the message (negative from the end), or a role, "generation_prompt" and the reply's
                "assistant" included; a role covers all its messages.

        Raises:
            InvalidSpec: there is no such message, the chat template leaves it out of the prompt, its position there is
                unclear, or the handle is not from `chat`.
        """
        count = 1 + max((span.index for span in self.messages if span.index is not None), default=-1)
        index = None if isinstance(message, str) else index_of(message)
        if index is not None and -count <= index < 0:
            index += count
        spans = [
            span
            for span in self.messages
            if (span.role == message if isinstance(message, str) else span.index is not None and span.index == index)
        ]
        if not spans:
            called = (span.role if span.index is None else f"{span.index}: {span.role}" for span in self.messages)
            known = ", ".join(dict.fromkeys(called)) or "none, for this handle is not from chat"
            raise InvalidSpec(f"no message {shown(message)}; messages: {known}")
        missing = [span for span in spans if span.missing]
        if unclear := [span for span in missing if span.missing != LEFT_OUT or len(missing) == len(spans)]:
            raise InvalidSpec(f"message {unclear[0].index} ({unclear[0].role}) {unclear[0].missing}")
        positions = self.positions
        mask = torch.zeros_like(positions, dtype=torch.bool)
        for span in spans:
            mask |= (positions >= span.start) & (positions < span.stop)
        return mask

    def attention(
        self, layer: int, *, top: int | None = None, tokens: Tokens | TokenSelection | None = None
    ) -> AttentionSummary:
        """Return the tokens that each head of a layer attends to most strongly, for each query token.

        The summary is computed here from captured `q` and `k`, or was computed in the worker with
        `CaptureSpec(attention=)`: weights are then within 1/510 of the model's, the entropy within a 2,048th or 3e-8.

        Args:
            layer: index of the layer; its `q` and `k` must have been captured, for every token that is seen.
            top: number of the most strongly attended tokens to return; None for 8, or for as many as the worker kept.
            tokens: the query tokens; None for all that were captured.

        Raises:
            LayerOutOfRange: `q` or `k` of the layer was not captured.
            InvalidSelection: `tokens` selects a token that was not captured, or that attends to one that was not.
            InvalidRequest: the model's attention is not supported, the rows are not those it read (reduced, projected,
                kept as codes, or from before their edits), or `top` is no number above 0 or exceeds the number kept.
        """
        kept = self._targets(layer)
        given = (8 if kept is None else kept.coding.k) if top is None else top
        count = count_of(given, "top", wrong=InvalidRequest)
        if kept is None:
            return summarised(self._attending(layer, tokens), count)
        if count > kept.coding.k:
            raise InvalidRequest(
                f"top={count}: {kept.coding.k} targets of each head and token were kept; give a number up to "
                f"{kept.coding.k}"
            )
        at = slice(None) if tokens is None else self._rows_at(tokens)
        return summary_of(kept[at].numbers(), self.positions[at], count)

    def _targets(self, layer: int) -> CodedRows | None:
        """Return the most strongly attended tokens of a layer, if the worker kept them in place of `q` and `k`."""
        kept = self.captures.whole((layer, "q"))
        return kept if isinstance(kept, CodedRows) and kept.codec == ATTENTION else None

    def attention_pattern(
        self, layer: int, *, tokens: Tokens | TokenSelection | None = None, max_bytes: int = PATTERN_BYTES
    ) -> torch.Tensor:
        """Return all attention weights of a layer, for short prompts; they are computed here from captured `q` and `k`.

        Args:
            layer, tokens: as for `attention`.
            max_bytes: maximum size of the result in bytes, 4 bytes a weight.

        Returns:
            float32 [heads, tokens, rows], a column for each of `positions`; rows sum to 1, or to less where the head
            has a learned sink.

        Raises:
            LayerOutOfRange, InvalidSelection: as for `attention`.
            InvalidRequest: as for `attention`; the result would exceed `max_bytes`; or `max_bytes` is no whole number.
        """
        most = index_of(max_bytes)
        if most is None:
            raise InvalidRequest(f"max_bytes={shown(max_bytes)}; give a whole number of bytes")
        return pattern(self._attending(layer, tokens), most)

    def _attending(self, layer: int, tokens: Tokens | TokenSelection | None) -> Attending:
        if (kept := self._targets(layer)) is not None:
            raise InvalidRequest(
                f"the handle holds {kept}, and the weights of all tokens are computed from queries and keys; capture "
                "sites=('q', 'k')"
            )
        queries, keys = self.captures[layer, "q"], self.captures[layer, "k"]
        index = operator.index(layer) % self.num_layers
        rule = self.attention_rules.get(index, AttentionRule(0.0, unknown="this handle was made without its rule"))
        rule.understood(index)
        at = slice(None) if tokens is None else self._rows_at(tokens)
        return Attending(rule, queries[at], keys, self.positions[at], self.positions)

    def _rows_at(self, tokens: Tokens | TokenSelection) -> torch.Tensor:
        """Return the row indices of selected tokens, int64 [selected]; InvalidSelection if one has no captured row."""
        selection, total = (
            TokenSelection.parse(tokens),
            len(self.prompt_token_ids) + max(len(self.output_token_ids) - 1, 0),
        )
        wanted = torch.from_numpy(selected(selection.ranges(len(self.prompt_token_ids), total), total).nonzero()[0])
        lacking = wanted[~torch.isin(wanted, self.positions)]
        if len(lacking):
            raise InvalidSelection(f"tokens={selection}: no row of position {int(lacking[0])} was captured")
        return torch.searchsorted(self.positions, wanted)

    async def lens(
        self,
        layer: int | None = None,
        *,
        site: str | None = None,
        tokens: Tokens | TokenSelection | None = None,
        translator: TunedLens | None = None,
        top: int = 10,
        ids: Sequence[int] = (),
        full: bool = False,
        max_bytes: int = MOST_BYTES,
    ) -> Lens:
        """Return next-token predictions from captured rows, by the model's own final norm and unembedding on workers.

        Without `layer` they are the model's own: the logits that it samples from, with the log probabilities that vLLM
        reports, except for a LoRA adapter's change of the unembedding itself, a `LogitBias`, and what a codec rounds.

        Args:
            layer: layer of the rows; None for rows behind the final norm, or at the end of the last layer.
            site: "resid_post" (what None means with `layer`), "resid_pre", "resid_mid", "embed" or "final_norm".
            tokens: selection of the rows, as for `CaptureSpec`; None for all that were captured.
            translator: a tuned lens, which maps rows to estimates of the last layer's; None for the logit lens.
            top: number of most probable tokens to return.
            ids: token ids whose log probabilities to return.
            full: True to return the logits of all tokens.
            max_bytes: maximum size of these logits in bytes.

        Raises:
            CaptureNotFetched, CaptureReleased: as for `captures`.
            InvalidRequest: the rows were not captured, are not of the residual stream or (without `layer`) were edited
                afterwards; the handle is from a file or a server (use `unembed`); a number is out of range.
            InvalidSelection: a selected token has no captured row.
            EngineFailure: the engine has died or was closed.
        """
        source = self._open_source("lens", "give its rows to unembed() of an open model")
        self._require_rows("lens")
        point = point_of(self.points, self.num_layers, layer, site)
        if layer is None and site in {None, "resid_post", BEHIND}:
            source.require_own(point, Point(self.num_layers - 1, BEHIND))
        at = slice(None) if tokens is None else self._rows_at(tokens)
        rows = self.captures.elements(point)[at]
        if translator is not None:
            if len(translator) != self.num_layers:
                raise InvalidRequest(
                    f"lens: {translator!r} is of a model of {len(translator)} layers, and this model has "
                    f"{self.num_layers}; load a tuned lens of this model"
                )
            rows = translator.translate(rows, point, source.engine.names)
        asked: Any = {"normed": point.site == BEHIND, "top": top, "ids": ids, "full": full, "max_bytes": max_bytes}
        found = await source.with_restart(lambda engine: unembed(engine, rows, **asked))
        return replace(found, positions=self.positions[at])

    async def experts(self, layer: int, *, tokens: Tokens | TokenSelection | None = None) -> Experts:
        """Return the experts that a layer chose for each token, with their weights, from logits captured at `router`.

        The layer's own router in vLLM computes them, on the workers. If the rows were edited, it reads edited logits.

        Args:
            layer: index of the layer; its `router` must have been captured.
            tokens: selection of the rows, as for `CaptureSpec`; None for all that were captured.

        Raises:
            CaptureNotFetched, CaptureReleased: as for `captures`.
            InvalidRequest: the logits were not captured or are not those that the layer chose by (reduced, projected,
                kept as codes, from before their edits, not finite); the layer has no experts or does not choose by
                logits alone; or the handle is from a file or a server.
            InvalidSelection: a selected token has no captured row.
            EngineFailure: the engine has died or was closed.
        """
        self._require_rows("experts")
        advice = "only workers of an open model can choose experts; call experts() on a handle of that model"
        source = self._open_source("experts", advice)
        index, rows = logits_of(source, self.captures, layer, self.num_layers)
        at = slice(None) if tokens is None else self._rows_at(tokens)
        return await source.with_restart(lambda engine: experts(engine, index, rows[at], self.positions[at]))

    def _open_source(self, purpose: str, advice: str) -> Source:
        """Return the open model that the rows are from; raise InvalidRequest for a handle from a file or a server."""
        source = self.lifecycle.source
        if not isinstance(source, Source):
            raise InvalidRequest(f"{purpose}: the handle is from {'a server' if source else 'a file'}; {advice}")
        return source

    def _require_rows(self, purpose: str) -> None:
        """Check that the handle has a row for each token; raise InvalidRequest for projections or a reduction."""
        if self.directions or self.receipt.reduce:
            held = "projections" if self.directions else f"the {self.receipt.reduce} of its tokens"
            raise InvalidRequest(f"{purpose}: the handle holds {held}; capture rows, without project= or reduce=")

    def to_numpy(self) -> dict[Point, np.ndarray[Any, Any]]:
        """Return the decoded rows as NumPy arrays by point; bfloat16, which NumPy lacks, becomes float32."""
        return {
            point: (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
            for point, rows in self.captures.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write rows, labels and texts to one safetensors file, and return its path; see `steercap.captures.files`.

        Raises:
            CaptureNotFetched: before `fetch()`.
        """
        return files.write(self.as_saved(), Path(path))

    def save_npz(self, path: str | Path) -> Path:
        """Write rows, labels and texts to one `.npz`, for programs that read NumPy files; see `steercap.captures.npz`.

        Arrays are named by point, `resid_post.8`; bfloat16 becomes float32. Rows in `full8` are `resid_post.8.q`,
        `.scale`, `.zero`, with the published formula `(q - zero) * scale`; `about`, a JSON text, has the formula of any
        codec. Nothing is pickled. The file cannot be loaded as a handle; use `save` for that.

        Returns:
            The path of the file.

        Raises:
            CaptureNotFetched: before `fetch()`.
            InvalidFile: the name ends in something other than .npz.
        """
        return npz.write(self.as_saved(), Path(path))

    def as_saved(self) -> files.Saved:
        """Return the content of the file that `save` would write, with rows undecoded.

        Raises:
            CaptureNotFetched, CaptureReleased: as for `captures`.
        """
        receipt = self.receipt
        rows = {point: self.captures.as_kept(point) for point in self.points}
        firsts = (kept[0] if isinstance(kept, tuple) else kept for kept in rows.values())
        coded = [first for first in firsts if isinstance(first, CodedRows)]
        header = files.Header(
            version=files.VERSION,
            model=self.model,
            request_id=self.request_id,
            text=self.text,
            num_layers=self.num_layers,
            points=self.points,
            messages=self.messages,
            media=self.media,
            reduce=receipt.reduce,
            writes=receipt.writes,
            steering=receipt.steering,
            verified=receipt.verified,
            recomputed=receipt.recomputed,
            directions=self.directions,
            marks=self.marks,
            coding=coded[0].coding if coded else RAW,
            schemas=tuple(first.schema for first in coded),
            shards=tuple(len(kept) if isinstance(kept, tuple) else 0 for kept in rows.values()),
            attention_rules=self.attention_rules,
            adapter=self.adapter or msgspec.UNSET,
        )
        labels = self.positions, self.token_ids, self.prompt_token_ids, self.output_token_ids
        return files.Saved(header, rows, *labels, self.recorded_attention)

    @staticmethod
    def load(path: str | Path) -> CaptureHandle:
        """Read a handle that `save` wrote; its rows are fetched.

        Raises:
            InvalidFile: the file is truncated, of another kind or a newer version, or its rows, labels, prompt and
                output contradict each other. Changed numbers are not noticed here, but by `Manifest.handles`.
        """
        header, rows, positions, token_ids, prompt_token_ids, output_token_ids, recorded = files.read(Path(path))
        labels = positions.numpy(), token_ids.numpy()
        receipt = Receipt(
            header.points,
            *labels,
            header.writes,
            header.reduce,
            header.steering,
            header.verified,
            header.recomputed,
        )
        return CaptureHandle(
            request_id=header.request_id,
            model=header.model,
            text=header.text,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            points=header.points,
            num_layers=header.num_layers,
            lifecycle=Lifecycle(header.request_id, found=Found(Captures(rows, header.num_layers), receipt)),
            messages=header.messages,
            media=header.media,
            directions=header.directions,
            marks=header.marks,
            attention_rules=header.attention_rules,
            recorded_attention=recorded,
            adapter=header.adapter or "",
        )

    def release(self) -> None:
        """Drop the rows, here and in the worker; nothing can be read afterwards. Idempotent."""
        self.lifecycle.release()

    async def __aenter__(self) -> CaptureHandle:
        return await self.fetch()

    async def __aexit__(self, *_exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = _STATES.get(self.lifecycle.stage, "released")
        rows = repr(self.captures) if self.fetched else f"{state}, {layers_by_site(self.points)}"
        return f"CaptureHandle({self.request_id}, {rows}, text={described(self.text)})"


def holding(handle: CaptureHandle, rows_found: Found, *, prompts: bool = True) -> CaptureHandle:
    """Return a handle of the same request with other rows of it; without `prompts`, its prompt token ids become -1."""
    rows = rows_found.captures.all_kept()
    exact = all(isinstance(one, torch.Tensor) for one in rows.values())
    return CaptureHandle(
        request_id=handle.request_id,
        model=handle.model,
        text=handle.text,
        prompt_token_ids=handle.prompt_token_ids if prompts else (-1,) * len(handle.prompt_token_ids),
        output_token_ids=handle.output_token_ids,
        points=tuple(rows),
        num_layers=handle.num_layers,
        lifecycle=Lifecycle(handle.request_id, found=rows_found),
        messages=handle.messages,
        media=handle.media if prompts else (),
        directions=handle.directions,
        marks=handle.marks,
        attention_rules=handle.attention_rules if exact else {},
        recorded_attention=handle.recorded_attention,  # of a loaded handle, whose rows are not parted
        adapter=handle.adapter,
    )
