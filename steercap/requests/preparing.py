"""Preparation of one request: its arguments are checked and compiled into a job, before the engine gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from steercap.core.attention import AttentionRule
from steercap.core.chat import MessageSpan
from steercap.core.plan import AttentionPlan, Plan, compile_capture
from steercap.core.schema import RAW, Coding
from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import TokenSelection, selected
from steercap.engine.sae_readers import Readers
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.kernels.codecs.topk import MOST_POSITIONS
from steercap.requests.job import CompiledSteering, Job
from steercap.requests.monitor_readers import ReadAt, monitor_readers_of, reader_for
from steercap.requests.monitoring import Watch
from steercap.requests.sketching import RunningSketch, joint_capture
from steercap.steering.calibration import Calibrated
from steercap.steering.lowering import CompiledProjection, biased_by, scopes_of
from steercap.steering.monitor import Monitor, held_back, monitors_of

if TYPE_CHECKING:
    from steercap.adapters import PoolingParams, SamplingParams
    from steercap.engine.engine import Engine


class _CheckedParams(NamedTuple):
    """Checked vLLM parameters of a request, with number of samples; other fields as in `Job`."""

    params: SamplingParams | PoolingParams
    samples: int
    stops: bool
    task: str | None


class OriginalLengths(NamedTuple):
    """Original lengths of a sequence whose generated tokens are now part of the prompt.

    Args:
        prompt_len: number of tokens of the original prompt.
        limit: maximum number of positions that could be inputs of the model.
    """

    prompt_len: int
    limit: int


async def _vllm_params(engine: Engine, params: Any, *, encoding: bool) -> _CheckedParams:
    """Convert the user's parameters to vLLM's: pooling parameters if `encoding`, else sampling parameters.

    Raises:
        InvalidRequest: see `VllmEngine.sampling` and `VllmEngine.pooling`.
    """
    if encoding:
        pooling = await engine.vllm.pooling(params)
        return _CheckedParams(pooling, 1, stops=False, task=pooling.task)
    sampling = engine.vllm.sampling(params)
    return _CheckedParams(sampling, sampling.n, stops=bool(sampling.stop), task=None)


async def prepare(
    engine: Engine,
    prompt: Any,
    params: Any,
    spec: CaptureSpec | None,
    steering: Any,
    *,
    options: dict[str, Any],
    spans: Sequence[MessageSpan] = (),
    reading: bool = False,
    sketches: Sequence[RunningSketch] = (),
    encoding: bool = False,
    monitors: Any = None,
    original_lengths: OriginalLengths | None = None,
) -> Job:
    """Check one request and compile it into a job, before the engine gets it.

    Args:
        engine: the engine that will run the job.
        prompt, params, spec, steering: as the user gave them.
        options: further arguments of vLLM's `generate` or `encode`.
        spans, reading, sketches: see `Job`.
        encoding: True if the model is a pooling model.
        monitors: the monitors of the request, as the user gave them.
        original_lengths: lengths that token selections refer to, if the prompt contains tokens that were generated
            before; None for the prompt's own.

    Raises:
        InvalidRequest: an argument is invalid; a subclass names the kind.
    """
    vllm = engine.vllm
    watching = monitors_of(monitors)
    kept = _kept(engine, spec, sketches, watching)
    held = held_back(watching)
    if held is not None and steering is not None:
        raise InvalidSpec("give a monitor with do='steer' or steering=, not both")
    steering = held or steering
    lowered = None if steering is None else engine.compiler.lowered(steering)
    asked = await _vllm_params(engine, params, encoding=encoding)
    stops = asked.stops or any(monitor.do == "stop" for monitor in watching)
    rendered = await vllm.render(prompt)
    options = await vllm.checked(rendered, asked.params, options)
    prompt_len = len(rendered.token_ids)
    original_lengths = original_lengths or OriginalLengths(prompt_len, vllm.limit(prompt_len, asked.params))
    limit = original_lengths.limit
    capture, needed = None, kept.projected or kept.calibrated
    if kept.spec is not None:
        capture = compile_capture(
            kept.spec,
            kept.indices,
            kept.coding,
            prompt_len=original_lengths.prompt_len,
            limit=limit,
            # Workers may run far past a stop string; else only as far as vLLM runs ahead, which they leave out.
            accumulates=not stops and asked.samples <= engine.reductions,
            vectors=None if needed is None else needed.plan,
            attention=kept.attention,
        )
        if kept.attention is not None and limit > MOST_POSITIONS:
            raise InvalidRequest(
                f"attention={kept.attention.top} is for sequences of up to {MOST_POSITIONS:,} tokens, and this one may "
                f"have {limit:,}; lower max_tokens, or capture sites=('q', 'k')"
            )
        capture = engine.windowed(capture, limit, asked.samples)
    compiled = None
    if lowered is not None:
        compiled = CompiledSteering(
            lowered, *scopes_of(lowered, *original_lengths), biased_by(lowered, *original_lengths)
        )
        _check_biases(asked, compiled, prompt_len)
    plan = None
    if capture is not None or compiled is not None:
        plan = Plan(engine.new_key(), prompt_len, limit, asked.samples, capture)
    if held is not None and compiled is not None and plan is not None:
        if compiled.biased or compiled.replaced:
            raise InvalidSpec("a monitor's steering= must hold edits that add to rows; leave LogitBias and Replace out")
        compiled = replace(compiled, held=plan.key)
    watch = None
    if watching and plan is not None:
        monitor_readers = monitor_readers_of(watching, kept.read_at, plan)
        watch = Watch(plan.key, monitor_readers, prompt_len=prompt_len, limit=limit, samples=asked.samples)
    return Job(
        engine,
        rendered,
        asked.params,
        options,
        plan,
        kept.points,
        kept.projected,
        kept.calibrated,
        kept.readers,
        compiled,
        tuple(spans),
        reading=reading,
        task=asked.task,
        stops=stops,
        sketches=tuple(sketches),
        hands_over=spec is not None,
        watch=watch,
    )


class _Kept(NamedTuple):
    """Capture of a request, compiled for one engine; see `Job`.

    Args:
        spec: the spec that selects tokens, None if nothing is captured.
        indices: indices of the points among the armed ones, ascending.
        coding: encoding of the rows.
        read_at: see `ReadAt`.
        attention: plan of the summary of attention, or None; with it, `points` are those of the queries.
    """

    spec: CaptureSpec | None = None
    points: tuple[Point, ...] = ()
    indices: tuple[int, ...] = ()
    projected: CompiledProjection | None = None
    calibrated: Calibrated | None = None
    readers: Readers | None = None
    coding: Coding = RAW
    read_at: ReadAt = ()
    attention: AttentionPlan | None = None


def _kept(engine: Engine, own: Any, sketches: Sequence[RunningSketch], monitors: Sequence[Monitor]) -> _Kept:
    """Return the capture of a request: the user's own, or the one that its sketches or monitors need.

    Raises:
        InvalidSpec: the capture is invalid, or does not go with the sketches or monitors; a subclass names the kind.
    """
    if own is not None and not isinstance(own, CaptureSpec):
        raise InvalidSpec(f"capture={own!r}; give a CaptureSpec, or capture_layers= for layers alone")
    if monitors and sketches:
        raise InvalidSpec("monitors= cannot be used inside model.sketch(); make the call outside")
    if monitors and own is None:
        places = engine.compiler.probe_points(monitors)
        projected, columns = engine.compiler.probed(monitors, places)
        return _Kept(
            CaptureSpec(tokens=TokenSelection(tuple(term for one in monitors for term in one.selection.terms))),
            projected.points,
            tuple(engine.armed[point] for point in projected.points),
            projected,
            coding=Coding("projected", len(projected.names)),
            read_at=tuple(zip(places, columns, (one.power for one in monitors), strict=True)),
        )
    if sketches:
        spec, points, indices = joint_capture(engine, own, sketches)
    elif own is None:
        return _Kept()
    else:
        spec, (points, indices) = own, engine.compiler.captured(own)
    kept = _Kept(
        spec,
        points,
        indices,
        engine.compiler.projected(spec),
        engine.compiler.calibrated(spec),
        engine.compiler.readers(spec),
        engine.compiler.coding(spec),
    )
    if spec.attention is not None:
        queries = tuple(point for point in points if point.site == "q")
        kept = kept._replace(points=queries, attention=_attention(engine, spec.attention, queries))
    if not monitors:
        return kept
    return kept._replace(
        read_at=reader_for(spec, kept.coding, points, monitors, engine.compiler.probe_points(monitors))
    )


def _attention(engine: Engine, top: int, queries: Sequence[Point]) -> AttentionPlan:
    """Compile the summary of attention of the layers of `queries`, with `top` tokens per head.

    Raises:
        InvalidRequest: the attention of a layer is not supported.
    """
    for layer, _ in queries:
        engine.attention.get(layer, AttentionRule(0.0, unknown="it has no rule")).understood(layer)
    armed = engine.armed
    return AttentionPlan(
        top, tuple((layer, armed[Point(layer, "q")], armed[Point(layer, "k")]) for layer, _ in queries)
    )


def _check_biases(request: _CheckedParams, compiled: CompiledSteering, prompt_len: int) -> None:
    """Check that logit biases can be applied: the model computes logits, and vLLM returns no unbiased ones.

    Raises:
        InvalidSpec: the model is a pooling model, or `prompt_logprobs` are requested at biased positions.
    """
    from steercap.adapters.parameters import wants_prompt_logprobs

    if not compiled.biased:
        return
    if request.task is not None:
        raise InvalidSpec("LogitBias: a pooling model computes no logits; edit rows instead")
    params = cast("SamplingParams", request.params)
    if wants_prompt_logprobs(params) and any(selected(ranges, prompt_len - 1).any() for ranges in compiled.biased):
        raise InvalidSpec(
            "LogitBias with prompt_logprobs: the logits for prompt_logprobs are computed separately and cannot be "
            "biased; give tokens=['last_prompt', 'generated'], or leave prompt_logprobs out"
        )
