"""Engine that vLLM's server uses: requests that use steercap run as jobs, with their numbers, others unchanged."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.captures import files
from steercap.captures.fetching import Arrived
from steercap.captures.handle import CaptureHandle
from steercap.core.receipt import SteeringReceipt
from steercap.errors import InvalidRequest, SteercapError
from steercap.kernels.codecs.coded import coding_of
from steercap.requests.job import Job, Sample, handles_of, memory_for, outputs_of, planned, receipts_of, rows_so_far
from steercap.requests.preparing import prepare
from steercap.server.call import CURRENT, Live, SteercapRequest
from steercap.server.folder import CaptureFolder, CaptureStore

if TYPE_CHECKING:
    from steercap.adapters.types import RequestOutput
    from steercap.core.budget import Ticket
    from steercap.model import SteerModel


class Numbers:
    """Streamed numbers of one job.

    Args:
        call: call that the numbers belong to.
        first: index of the job's first choice in the call.
        job: the running job; numbers are only streamed if its answer is a stream.
    """

    def __init__(self, call: SteercapRequest, first: int, job: Job) -> None:
        self._call, self._first, self._job = call, first, job
        params: Any = job.params
        self._streams = params.output_kind.name == "DELTA"
        self._projects = job.hands_over and job.projected is not None and self._streams
        self._tokens: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._crossings: dict[int, int] = {}

    async def take(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Queue the new numbers for the stream.

        Args:
            tokens: tokens generated so far, by the index of the sample.

        Raises:
            CaptureIncomplete, CaptureNotFinite: a row is missing or invalid.
        """
        if self._projects:
            grown = {index: ids for index, ids in tokens.items() if len(ids) > self._tokens.get(index, 0)}
            self._tokens |= {index: len(ids) for index, ids in grown.items()}
            some = {index: (ids, self._rows.get(index, 0)) for index, ids in grown.items()}
            for index, came in (await rows_so_far(self._job, some)).items():
                self._rows[index] = self._rows.get(index, 0) + len(came.positions)
                if len(came.positions):
                    self._put(index, "scores", self._scores(came))
        if self._streams and self._job.watch is not None:
            for index in tokens:
                found = self._job.watch.crossings(index)
                for one in found[self._crossings.get(index, 0) :]:
                    self._put(index, "crossings", msgspec.to_builtins(one))
                self._crossings[index] = len(found)

    def _scores(self, came: Arrived) -> dict[str, Any]:
        """Return the projections of rows, by point and direction."""
        assert self._job.projected is not None
        names = self._job.projected.names
        scores = {
            f"{point.site}.{point.layer}": dict(zip(names, came.captures[point].T.tolist(), strict=True))
            for point in came.captures
        }
        return {"positions": came.positions.tolist(), "scores": scores}

    def _put(self, index: int, kind: str, content: dict[str, Any]) -> None:
        self._call.live.append(Live(self._first + index, kind, content))


#: Maximum bytes of files within an answer.
MOST_INLINE: Final = 8 << 20


class ServedEngine:
    """Wrapper of vLLM's engine for vLLM's server.

    Args:
        model: the open model.
        captures: store of captures that wait to be fetched.
        translated: function from a steercap error to one that vLLM's server answers with the right status.
        folder: folder for rows that requests ask to be written, None if the operator gave none.
    """

    def __init__(
        self,
        model: SteerModel,
        captures: CaptureStore,
        translated: Callable[[SteercapError], Exception],
        folder: CaptureFolder | None = None,
    ) -> None:
        self._model = model
        self._llm: Any = model.engine
        self._captures = captures
        self._translated = translated
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the model is closed by its opener."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return vLLM's outputs of one request; see `AsyncLLM.generate`."""
        call = CURRENT.get()
        if call is None:
            found: AsyncGenerator[RequestOutput, None] = self._llm.generate(
                prompt, sampling_params, request_id, **options
            )
            return found
        first = call.prompts * sampling_params.n
        call.prompts += 1
        return self._asked(call, first, prompt, sampling_params, options)

    async def _asked(
        self, call: SteercapRequest, first: int, prompt: Any, params: Any, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        from steercap.adapters.prompts import rendered

        engine = self._model.serving.here()
        options = {name: value for name, value in options.items() if value is not None}
        options.pop("prompt_text", None)
        options.pop("tokenization_kwargs", None)
        try:
            if call.asked.capture is not None:
                self._room(call).require_room(call.owner)
            job = await prepare(
                engine,
                rendered(prompt),
                params,
                call.asked.capture,
                call.asked.steering,
                options=options,
                monitors=call.asked.monitors,
            )
            async with aclosing(self._run(call, first, job)) as outputs:
                async for output in outputs:
                    yield output
        except SteercapError as error:
            call.error = type(error).__name__
            raise self._translated(error) from error

    async def _run(self, call: SteercapRequest, first: int, job: Job) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a job; the last one once its edits are confirmed and its rows are fetched."""
        ticket = await memory_for(job, object())
        ours = job.plan is not None  # the workers hold state of the job that we must free
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        numbers = Numbers(call, first, job)
        try:
            async with planned(job) as complete, aclosing(outputs_of(job, complete, ticket, partial=None)) as outputs:
                async for output in outputs:
                    grown(output, job.params, texts, tokens)
                    samples = [(index, len(ids)) for index, ids in sorted(tokens.items())]
                    receipts = await receipts_of(job, complete.plan, samples, ended=output.finished)
                    await numbers.take(tokens)
                    if output.finished:
                        ours = False
                        ended = [Sample(index, texts[index], ids) for index, ids in sorted(tokens.items())]
                        found = await self._handed_over(call, job, ended, ticket, receipts)
                        call.results += [
                            {"choice": first + sample.index} | one for sample, one in zip(ended, found, strict=True)
                        ]
                    yield output
        finally:
            if ours and job.plan is not None:
                job.engine.abandon(job.plan, ticket)

    async def _handed_over(
        self,
        call: SteercapRequest,
        job: Job,
        samples: Sequence[Sample],
        ticket: Ticket | None,
        receipts: Sequence[SteeringReceipt] | None,
    ) -> list[dict[str, Any]]:
        """Return the results of each sample for the answer."""
        found: list[dict[str, Any]] = [{} for _ in samples]
        for one, receipt in zip(found, receipts or (), strict=False):
            one["steering"] = {
                "rows": list(receipt.rows),
                "computed": receipt.computed,
                "cached": receipt.cached,
                "digest": receipt.digest,
            }
        if job.watch is not None:
            for one, sample in zip(found, samples, strict=True):
                one["monitors"] = [msgspec.to_builtins(report) for report in job.watch.reports(sample.index)]
        if ticket is None:
            return found
        if not job.hands_over:
            assert job.plan is not None
            job.engine.done_with(job.plan, ticket)
            return found
        handles = handles_of(job, samples, ticket, receipts)
        try:
            await self._model.fetch_captures_batch(handles)
            for one, handle, place in zip(found, handles, await self._delivered(call, handles), strict=True):
                one["capture"] = described(handle) | place
        finally:
            for handle in handles:
                handle.release()
        return found

    def _room(self, call: SteercapRequest) -> CaptureStore | CaptureFolder:
        """Return the store for the rows of a request."""
        return self._folder if self._folder is not None and call.asked.delivery == "folder" else self._captures

    async def _delivered(self, call: SteercapRequest, handles: Sequence[CaptureHandle]) -> list[dict[str, Any]]:
        """Deliver the rows of each handle; return their places for the answer."""
        if isinstance(folder := self._room(call), CaptureFolder):
            written = await folder.write(handles, call.owner)
            return [{"file": one.file, "bytes": one.bytes, "sha256": one.sha256} for one in written]
        return [self._handed(call, await asyncio.to_thread(files.encode, handle.as_saved())) for handle in handles]

    def _handed(self, call: SteercapRequest, content: bytes) -> dict[str, Any]:
        """Deliver a file in the answer or by the store; return its place for the answer."""
        if call.asked.delivery == "inline":
            call.inline += len(content)
            if call.inline > MOST_INLINE:
                raise InvalidRequest(
                    f"the rows take {call.inline:,} bytes, and an answer holds {MOST_INLINE:,}; leave deliver= out "
                    "and fetch them, or keep fewer"
                )
            return {"bytes": len(content), "data": base64.b64encode(content).decode()}
        waiting = self._captures.put(content, call.owner)
        call.unsaid.append(partial(self._captures.remove, waiting.name, call.owner))
        # The capture is removed when it expires, even if no further request comes.
        asyncio.get_running_loop().call_later(self._captures.time_to_live + 1, self._captures.sweep)
        return {
            "id": waiting.name,
            "bytes": len(content),
            "url": f"/v1/steercap/captures/{waiting.name}",
            "expires_in": round(self._captures.expires_in(waiting), 1),
        }


def grown(output: RequestOutput, params: Any, texts: dict[int, str], tokens: dict[int, list[int]]) -> None:
    """Add an output's texts and tokens to those of its samples: its outputs are cumulative, or deltas."""
    new = params.output_kind.name == "DELTA"
    for sample in output.outputs:
        texts[sample.index] = (texts.get(sample.index, "") if new else "") + sample.text
        if new:
            tokens.setdefault(sample.index, []).extend(sample.token_ids)
        else:
            tokens[sample.index] = [*sample.token_ids]


def described(handle: CaptureHandle) -> dict[str, Any]:
    """Describe a handle for msgspec's JSON.

    The result has its points with shapes and dtypes, its numbers of rows and tokens, and its file's header without the
    text, which the answer has already.
    """
    saved, receipt = handle.as_saved(), handle.receipt
    points = []
    for point in handle.points:
        kept = saved.rows[point]
        first = kept[0] if isinstance(kept, tuple) else kept
        codec, parameters = coding_of(first)
        rows = handle.captures[point] if codec == "raw" and not isinstance(kept, tuple) else None
        one: dict[str, Any] = {"layer": point.layer, "site": point.site, "codec": codec, **parameters}
        if rows is not None:
            one |= {"shape": list(rows.shape), "dtype": str(rows.dtype).removeprefix("torch.")}
        points.append(one)
    return {
        "points": points,
        "rows": len(handle.positions),
        "reduce": receipt.reduce,
        "prompt_tokens": len(handle.prompt_token_ids),
        "output_tokens": len(handle.output_token_ids),
        "directions": list(handle.directions),
        "verified": receipt.verified,
        "header": msgspec.structs.replace(saved.header, text=""),
    }
