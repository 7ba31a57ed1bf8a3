"""Wrapper of vLLM's AsyncLLM with the calls that steercap needs: start, check, generate, RPC to workers, shutdown.

It relies on `AsyncLLM.from_vllm_config`, `encode`, `generate` and its `data_parallel_rank`; and on
`additional_config` in the key of the compile cache.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, Final, Protocol

from vllm.exceptions import VLLMClientError, VLLMError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from steercap.adapters import detokenizer, torchvision
from steercap.adapters.arguments import (
    CONFIG_KEY,
    check_heads,
    check_supported,
    expected_family,
    overshoot,
    read_arguments,
    remade,
    worker_config,
)
from steercap.adapters.connection import FRESH_SECONDS, Connection
from steercap.adapters.entry import tell_workers
from steercap.adapters.hardware import attention_for, check_kernels, cpu_binding
from steercap.adapters.lora import Adapters
from steercap.adapters.parameters import ParamsReader, read_pooling, tasks_of
from steercap.adapters.process_exit import startup_error
from steercap.adapters.prompts import Rendered, render, text_ids
from steercap.adapters.reaper import Reaper
from steercap.adapters.releases import require
from steercap.adapters.wire import Wire
from steercap.architectures.sites import SITES
from steercap.config import LAYER_END, Settings
from steercap.core.plan import EXTRA_ARGS_KEY, Plan
from steercap.core.spec import Point
from steercap.core.values import shown
from steercap.errors import EngineDied, EngineFailure, InvalidRequest, ModelNotLoaded, SteercapError
from steercap.kernels.bits import overflows_later

RPC: Final = "steercap_answer"
#: Linux's folder of named shared memory.
_SHARED: Final = "/dev/shm"  # noqa: S108


class Starting(Protocol):
    """A start of an engine, the part of `adapters.launch.Launch` that `VllmEngine` uses."""

    @property
    def reaper(self) -> Reaper:
        """Reaper that ends the engine's processes."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's processes, besides those that the reaper sets."""

    def require_wanted(self) -> None:
        """Check that the start was not cancelled; ModelClosed if it was."""

    def end(self) -> None:
        """Kill the engine's processes and release the engine."""


class VllmEngine:
    """A running AsyncLLM whose workers have taps installed.

    Args:
        llm: the engine.
        points: points armed in its workers.
        exists: predicate that says, by the model's configuration, if the model has a point.
        launch: start of the engine, which owns its processes.
        unserved: kinds of media that prompts may not hold, since torchvision is absent.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        points: tuple[Point, ...],
        exists: Callable[[Point], bool],
        launch: Starting,
        unserved: tuple[str, ...] = (),
    ) -> None:
        require("a running AsyncLLM", llm)
        self._connection = Connection(llm, launch.reaper.folder)
        self._wire = Wire(llm)
        self._params = ParamsReader()
        self._adapters = Adapters(llm.vllm_config, self._load_adapter)
        self.launch = launch
        self.points = points
        self.exists: Final = exists
        self._unserved: Final = unserved
        config = llm.vllm_config.model_config
        self.model_name: str = config.model
        #: Commit hash of a model from the hub, "" if vLLM does not know it.
        self.commit: Final = str(getattr(config.hf_config, "_commit_hash", None) or "")
        #: `model_type` of the model's configuration and of its text part, by which vector files may name the model.
        self.model_types: Final[tuple[str, str]] = (config.hf_config.model_type, config.hf_text_config.model_type)
        self.num_layers: int = config.get_total_num_hidden_layers()
        self.max_model_len: int = config.max_model_len
        self.hidden_size: int = config.get_hidden_size()
        self.vocabulary: int = config.get_vocab_size()
        self.config: Final = config.hf_text_config
        self.max_logprobs: int = config.max_logprobs
        self._policy: Final = llm.vllm_config.scheduler_config.policy
        self._verifies_on_v2 = llm.vllm_config.use_v2_model_runner and llm.vllm_config.speculative_config is not None
        #: Number of requests so far that were aborted, or never ran; a worker may still run their first pass.
        self.aborted = 0
        #: Maximum bytes of captured rows that may wait to be fetched; None: admission alone bounds them.
        self.held_bytes: Final[int | None] = None
        #: Sampling parameters to add to a request whose text is not needed.
        self.without_text: Final[Mapping[str, Any]] = {"detokenize": False}
        #: True for a pooling model, which generates no tokens.
        self.pools: bool = config.runner_type == "pooling"
        #: Number of positions that vLLM may compute beyond a request's end, before its scheduler learns of the end.
        self.overshoot = overshoot(llm.vllm_config)
        #: Maximum number of tokens of a forward pass.
        self.batch_tokens: int = llm.vllm_config.scheduler_config.max_num_batched_tokens

    @classmethod
    def start(
        cls, model: str, settings: Settings, engine_args: Mapping[str, Any], launch: Starting, candidate: int = 0
    ) -> VllmEngine:
        """Start an engine with taps; blocks until it runs. Called by `Launch` alone.

        Args:
            model: path or name of the model.
            settings: sites to arm, and sizes of the workers' tables.
            engine_args: vLLM's engine arguments.
            launch: start that this is part of.
            candidate: index of the family to try, among those that the layers may be of; see `families.families_of`.

        Raises:
            InvalidSetting: an engine argument that does not exist or does not fit, or fewer cores than workers.
            ModelNotLoaded: vLLM cannot load the model, or has not the kernels for it on this processor.
            UnsupportedModel: the model lacks an armed site.
            UnsupportedRunner: an option excludes taps, or steercap has no adapter for vLLM's runner or release.
        """
        # A forked child of a process with threads can deadlock; vLLM's own server spawns too.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        require("AsyncLLM", AsyncLLM)
        _require_shared_memory()
        detokenizer.patch()
        torchvision.hook()
        args = read_arguments(model, engine_args)
        try:
            config = args.create_engine_config()
            needed: dict[str, Any] = attention_for(config)
            if unserved := torchvision.unserved_media(config):
                needed["limit_mm_per_prompt"] = {**args.limit_mm_per_prompt, **dict.fromkeys(unserved, 0)}
            if needed:
                config = remade(args, config, needed)
        except Exception as error:
            raise ModelNotLoaded(f"vLLM cannot load {model!r}: {error}") from error
        require("VllmConfig", config)
        expected, hf_config = expected_family(config.model_config), config.model_config.hf_text_config
        check_supported(config)
        check_kernels(config)
        if config.model_config.runner_type == "pooling":
            require("an AsyncLLM that pools", AsyncLLM)

        def exists(point: Point) -> bool:
            return expected is None or SITES[point.site].exists(expected, hf_config, point.layer)

        points = settings.armed(
            config.model_config.get_total_num_hidden_layers(),
            overflows_later=overflows_later(config.model_config.dtype),
            exists=exists,
            derived=expected is None,
            end=LAYER_END if expected is None else expected.end,
            within=("resid_mid", "mlp_in") if expected is not None and expected.norms else (),
        )
        check_heads(config, points)
        config.additional_config[CONFIG_KEY] = worker_config(points, settings, candidate)
        tell_workers(config, launch.reaper.environment)
        launch.environment.update(cpu_binding(config))
        launch.require_wanted()
        try:
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
        except Exception as error:
            start = f"vLLM's engine for {model!r} did not start"
            raise startup_error(launch.reaper.folder, start) or ModelNotLoaded(
                f"{start}: {error} (the worker's own log above says why)"
            ) from error
        return cls(llm, points, exists, launch, unserved)

    @property
    def llm(self) -> AsyncLLM:
        """The wrapped AsyncLLM.

        Raises:
            ModelClosed: the engine was shut down.
        """
        return self._connection.llm

    async def render(self, prompt: Any) -> Rendered:
        """Tokenise one prompt, which is a str, token ids, or one of vLLM's prompt dicts, without running it.

        Raises:
            InvalidPrompt: the prompt is empty, malformed, or too long for the context.
        """
        return await render(self.llm, prompt, self._unserved)

    def sampling(self, params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Return a copy of the user's sampling parameters as vLLM's SamplingParams; vLLM's defaults for None.

        Raises:
            InvalidRequest: as of `ParamsReader.read`; or an option is set that this engine's runner silently ignores.
        """
        found = self._params.read(params)
        if found.logprob_token_ids and self._verifies_on_v2:
            raise InvalidRequest(
                "logprob_token_ids: Model Runner V2 leaves them out where it verifies drafts; use logprobs=, or start "
                "without speculative_config"
            )
        return found

    async def pooling(self, params: PoolingParams | Mapping[str, Any] | None) -> PoolingParams:
        """Return a copy of the user's pooling parameters with the task filled in; the model's default task for None.

        Raises:
            InvalidRequest: see `read_pooling`.
            UnsupportedModel: the model has no task that requests can name.
        """
        return read_pooling(params, *await self.tasks())

    async def tasks(self) -> tuple[tuple[str, ...], str]:
        """Return the names of a pooling model's tasks, and that of its default task.

        Raises:
            UnsupportedModel: the model has no task that requests can name.
        """
        return tasks_of(await self.llm.get_supported_tasks(), self.llm.model_config)

    async def checked(
        self, prompt: Rendered, params: SamplingParams | PoolingParams, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check that the engine accepts a request, before it is sent, and load its LoRA adapter in the workers.

        Args:
            prompt: the rendered prompt.
            params: sampling or pooling parameters; vLLM fills in defaults of pooling parameters in place.
            options: further arguments of `AsyncLLM.generate` or `encode`.

        Returns:
            The options, with `lora_request` replaced by the adapter that the workers have loaded, or None.

        Raises:
            InvalidRequest: vLLM refuses the request, or could not decode it.
            EngineFailure: the engine has died.
        """
        self._connection.require_alive(FRESH_SECONDS)
        ready = {**options, "lora_request": await self._adapters.ready(options.get("lora_request"), params)}
        await self._wire.check(prompt.payload, params, ready)
        if (priority := options.get("priority")) and self._policy != "priority":
            raise InvalidRequest(
                f"priority={shown(priority)}: this engine serves requests in order of arrival; start it with "
                "scheduling_policy='priority', or leave it out"
            )
        return ready

    def follow(self, dead: VllmEngine) -> None:
        """Take over what requests of a dead engine rely on: the files of its LoRA adapters."""
        self._adapters.follow(dead._adapters)

    async def _load_adapter(self, *names: Any) -> list[Sequence[str]]:
        engines = await self._connection.call_workers("steercap_load_adapter", *names)
        return [answer for answers in engines for answer in answers]

    def limit(self, prompt_len: int, params: SamplingParams | PoolingParams) -> int:
        """Return the maximum number of tokens of a request that become model inputs: prompt + generated - 1."""
        if isinstance(params, PoolingParams):
            return prompt_len
        longest = self.max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
        return min(longest, self.max_model_len) - 1

    async def generate(
        self,
        prompt: Rendered,
        params: SamplingParams | PoolingParams,
        request_id: str,
        plan: Plan | None,
        *,
        salt: str = "",
        partial: bool | None = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput | PoolingRequestOutput, None]:
        """Run one request; yields vLLM's outputs, the last of them with `finished` True.

        Args:
            prompt: the rendered prompt.
            params: sampling parameters, or pooling parameters for a pooling model; changed in place.
            request_id: unique id of the request in the engine.
            plan: compiled capture and steering of the request, or None.
            salt: hash of what determines keys and values besides tokens, "" for nothing; appended to the user's
                `cache_salt`.
            partial: True to yield the text so far at every step, False for the finished output alone, None as `params`
                says.
            **options: further arguments of `AsyncLLM.generate` or `encode`.

        Raises:
            InvalidRequest: vLLM refuses the request, or cannot run it.
            EngineFailure: the engine has died, has aborted the request, or accepts none at present.
        """
        run: Callable[..., AsyncGenerator[Any, None]] = self.llm.generate
        if isinstance(params, PoolingParams):
            run = self.llm.encode
        else:
            _report(params, partial)
        if plan is not None:
            _carry(plan, params)
        payload = prompt.payload
        if salt:
            payload = {**payload, "cache_salt": f"{payload.get('cache_salt') or ''}|steercap {salt}"}
        whole = False
        try:
            with self._connection.watch.checking():
                async with aclosing(run(payload, params, request_id, **options)) as outputs:
                    async for output in outputs:
                        _require_whole(output)
                        whole = output.finished
                        yield output
        except SteercapError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(f"vLLM refuses request {request_id}: {error}") from error
        except EngineDeadError as error:
            raise await self._connection.ended() from error
        except EngineGenerateError as error:
            raise InvalidRequest(f"vLLM could not run request {request_id}: {error.__cause__!r}") from error
        except VLLMError as error:  # the request is fine: vLLM's queue is full, or the engine pauses
            raise EngineFailure(f"vLLM did not run request {request_id}: {error}") from error
        finally:
            self.aborted += not whole

    @property
    def engines(self) -> int:
        """Number of engine cores: the data-parallel size."""
        return len(self.llm.engine_core.core_engines)

    async def rpc(self, frame: bytes, engine: int | None = None) -> list[list[bytes]]:
        """Send one encoded message to every worker, or to the workers of the engine with index `engine`.

        Returns:
            One list for each engine called, with its workers' encoded answers by rank.

        Raises:
            EngineFailure: the engine has died, or a worker failed.
            ModelClosed: the engine was shut down meanwhile.
        """
        return await self._connection.call_workers(RPC, frame, engine=engine)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm.renderer.get_tokenizer()

    @property
    def tokenizes(self) -> bool:
        """True if the engine has a tokenizer: it was not started with `skip_tokenizer_init=True`."""
        return not self.llm.model_config.skip_tokenizer_init

    def text_ids(self, text: str, special: bool | None) -> list[int]:
        """Tokenise a text as vLLM reads it; see `adapters.prompts.text_ids`."""
        return text_ids(self.llm, text, special)

    @property
    def texts(self) -> dict[str, bool]:
        """Defaults of vLLM for texts of this model: if it adds special tokens, and if it writes in lower case."""
        how = self.llm.renderer.default_cmpl_tok_params
        return {"add_special_tokens": how.add_special_tokens, "do_lower_case": how.do_lower_case}

    def text(self, prompt: Rendered, params: SamplingParams, tokens: Sequence[int]) -> str:
        """Return the text that vLLM would return for the generated token ids `tokens`, ignoring stop strings."""
        return detokenizer.text_of(self.tokenizer, params, prompt.token_ids, tokens)

    @property
    def died(self) -> bool:
        """True if the engine died before it was closed; checks now."""
        return self._connection.died

    async def watch(self, on_death: Callable[[EngineDied], object]) -> None:
        """Watch the processes of all workers on this machine from now on.

        Args:
            on_death: function called in this event loop with the error when the engine dies.
        """
        self._connection.on_death = on_death
        await self._connection.watch_workers()

    def waiting(self) -> AbstractContextManager[None]:
        """Watch the engine's liveness in the block, for a caller that waits without a running request; see `watch`.

        Raises:
            EngineFailure: the engine has died; raised by the call, before the block.
        """
        self._connection.require_alive(FRESH_SECONDS)
        return self._connection.watch.checking()

    async def quiesce(self) -> None:
        """Stop listening to the engine without reporting its death, and end its requests; call in its event loop."""
        await self._connection.quiesce()

    def end(self) -> None:
        """Kill the engine's processes and release it; callable from any thread, blocks for a moment. Idempotent."""
        self.launch.end()

    def let_go(self) -> None:
        """Close vLLM's client of the engine, and kill the engine's processes; callable from any thread. Idempotent."""
        self._connection.let_go(self.launch.reaper.end)


def _require_shared_memory() -> None:
    """Check that /dev/shm exists, through which vLLM's processes communicate; vLLM's own error is unclear.

    Raises:
        ModelNotLoaded: `/dev/shm` does not exist.
    """
    if not os.path.isdir(_SHARED):  # noqa: PTH112
        raise ModelNotLoaded(
            f"there is no {_SHARED}, through which vLLM's processes talk to each other; mount a tmpfs of 1 GiB there"
        )


def _carry(plan: Plan, params: SamplingParams | PoolingParams) -> None:
    """Write an encoded plan into a request's parameters, in place, which vLLM passes on to the workers.

    It also disables reads of the prefix cache where the plan needs all prompt rows, and where a request's samples,
    which share one cache salt, may be steered from different positions.
    """
    if isinstance(params, PoolingParams):
        params.extra_kwargs = {**(params.extra_kwargs or {}), EXTRA_ARGS_KEY: plan.encode()}
    else:
        params.extra_args = {**(params.extra_args or {}), EXTRA_ARGS_KEY: plan.encode()}
    if plan.reads_prompt or (plan.samples > 1 and plan.steering is not None and plan.steering.held):
        params.skip_reading_prefix_cache = True


def _report(params: SamplingParams, partial: bool | None) -> None:
    """Set `params.output_kind` in place: each step's output (True), the finished one (False), unchanged (None)."""
    if partial is not None:
        params.output_kind = RequestOutputKind.CUMULATIVE if partial else RequestOutputKind.FINAL_ONLY


def _require_whole(output: RequestOutput | PoolingRequestOutput) -> None:
    """Check that vLLM did not end a request early; raises InvalidRequest for an error, EngineFailure for an abort."""
    aborted = f"request {output.request_id} was aborted in the engine"
    if isinstance(output, PoolingRequestOutput):
        if output.finished and not output.outputs.data.numel():  # vLLM's output for a request that it aborted
            raise EngineFailure(f"{aborted}, and nothing was pooled")
        return
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise InvalidRequest(
                f"vLLM could not run request {output.request_id}, for example because no token is both allowed and of "
                "its structured output; the engine's log says why"
            )
        if sample.finish_reason == "abort":
            raise EngineFailure(f"{aborted}, and its text is cut short")
