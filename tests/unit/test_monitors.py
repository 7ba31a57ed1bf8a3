"""Monitors without an engine: what they may be, what they make of rows and outputs, and how numbers get into a stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput

from steercap import Add, Monitor
from steercap.captures.fetching import Arrived
from steercap.captures.rows import Captures
from steercap.core.program import SteeringPlan, scope_masks
from steercap.core.schema import Coding, PointSchema
from steercap.core.spec import Point
from steercap.core.tokens import Range, TokenSelection
from steercap.errors import CaptureNotFinite, InvalidSpec, InvalidVector, UnknownName
from steercap.kernels.codecs import ENCODINGS
from steercap.requests.monitor_readers import MonitorReader
from steercap.requests.monitoring import STOPPED, Watch
from steercap.server.call import Live, SteercapField, SteercapRequest
from steercap.server.middleware import AnswerSender
from steercap.steering.monitor import compile_probes, monitors_of

POINT = Point(1, "resid_post")
PROBE = torch.tensor([1.0, 0.0])
PROMPT = 3


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"threshold": math.nan}, InvalidSpec, "threshold=nan"),
        ({"threshold": True}, InvalidSpec, "threshold=True"),
        ({"bias": math.inf}, InvalidSpec, "bias=inf"),
        ({"layer": "3"}, InvalidSpec, "layer='3'"),
        ({"layer": True}, InvalidSpec, "layer=True"),
        ({"above": 1}, InvalidSpec, "above=1"),
        ({"site": "resid_past"}, UnknownName, "resid_past"),
        ({"do": "stopp"}, InvalidSpec, "give 'annotate', 'stop', 'steer'"),
        ({"do": "steer"}, InvalidSpec, "go together"),
        ({"steering": Add([1.0, 0.0], layer=1)}, InvalidSpec, "go together"),
        ({"name": 3}, InvalidSpec, "name=3"),
        ({"probe": [0.0, 0.0]}, InvalidVector, "zero"),
        ({"probe": [[1.0]]}, InvalidVector, "shape"),
        ({"probe": [1.0, math.nan]}, InvalidVector, "NaN"),
    ],
)
def test_a_monitor_says_what_is_wrong_with_it(wrong, error, says) -> None:
    with pytest.raises(error, match=says):
        Monitor(**{"probe": PROBE, "threshold": 0.0, "layer": 1, **wrong})


def test_monitors_have_names_of_their_own() -> None:
    """Those without one have their number."""
    one = Monitor(PROBE, threshold=0.0, layer=1)
    assert monitors_of([one, one]) == (one, one)
    with pytest.raises(InvalidSpec, match="a name= of its own"):
        monitors_of([one, Monitor(PROBE, threshold=0.0, layer=1, name="0")])
    with pytest.raises(InvalidSpec, match="may have 64"):
        monitors_of([one] * 65)
    with pytest.raises(InvalidSpec, match="list of Monitor"):
        monitors_of([{"probe": [1.0]}])


def test_a_score_at_the_threshold_is_not_beyond_it() -> None:
    assert not Monitor(PROBE, threshold=1.0, layer=1).fires(1.0)
    assert not Monitor(PROBE, threshold=1.0, layer=1, above=False).fires(1.0)
    assert Monitor(PROBE, threshold=1.0, layer=1).fires(1.1)
    assert Monitor(PROBE, threshold=1.0, layer=1, above=False).fires(0.9)


def test_points_keep_as_many_products_each() -> None:
    """Each monitor finds its own; where a point has fewer probes, they come again."""
    other = Point(2, "resid_post")
    probes = [
        Monitor([2.0, 0.0], threshold=0.0, layer=2),
        Monitor([0.0, 3.0], threshold=0.0, layer=1),
        Monitor([1.0, 1.0], threshold=0.0, layer=2),
    ]
    projected, columns = compile_probes(probes, [other, POINT, other], {POINT: 4, other: 7})
    assert (columns, projected.points, projected.names) == ((0, 0, 1), (POINT, other), ("0", "1"))
    (data,) = projected.lowered.vectors.values()
    kept = torch.frombuffer(bytearray(data), dtype=torch.float32).view(2, 2, 2)
    # over the power of two above their norms: 4, 4 and 2
    assert kept.tolist() == [[[0.0, 0.75], [0.0, 0.75]], [[0.5, 0.0], [0.5, 0.5]]]


def test_probes_of_one_request_are_of_one_width() -> None:
    with pytest.raises(InvalidSpec, match="one width"):
        compile_probes(
            [Monitor([1.0], threshold=0.0, layer=1), Monitor([1.0, 2.0], threshold=0.0, layer=1)],
            [POINT, POINT],
            {POINT: 0},
        )


# What a watch makes of outputs


class Runs:
    """A request whose outputs bring several tokens each, and whose rows have the score of their token, times ten."""

    def __init__(self, *steps: tuple[int, list[int], str | None], new: bool) -> None:
        self.steps, self.new, self.closed = steps, new, False
        self.all: dict[int, list[int]] = {}
        self.engaged: list[list[int]] = []

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for index, tokens, reason in self.steps:
                whole = self.all.setdefault(index, [])
                whole += tokens
                given = tokens if self.new else whole
                sample = CompletionOutput(index, text_of(given), [*given], None, None, finish_reason=reason)
                ended = reason is not None and (index, tokens, reason) == self.steps[-1]
                yield RequestOutput("r", None, [0] * PROMPT, None, [sample], ended)
        finally:
            self.closed = True

    async def engage(self, indices: Sequence[int]) -> list[int]:
        self.engaged.append([*indices])
        return [PROMPT + len(self.all[index]) + 1 for index in indices]

    async def rows(self, samples: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, Arrived]:
        found = {}
        for index, (tokens, first) in samples.items():
            total = PROMPT + len(tokens) - 1
            scores = [*[0.0] * PROMPT, *map(float, tokens)][:total]
            rows = torch.tensor(scores[first:])[:, None] * torch.tensor([10.0, 1.0])
            found[index] = Arrived(Captures({POINT: rows}, 4), np.arange(first, total))
        return found


class Together(Runs):
    """The same of sixteen samples, of which each output brings all."""

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        async for output in super().outputs():
            (sample,) = output.outputs
            self.all = dict.fromkeys(range(16), self.all[0])
            output.outputs = [dataclasses.replace(sample, index=index) for index in range(16)]
            yield output


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def watch_of(*monitors: Monitor, samples: int = 1) -> Watch:
    monitor_readers = [
        MonitorReader(one, one.name, POINT, TokenSelection.parse(one.tokens).ranges(PROMPT, 50), None)
        for one in monitors
    ]
    return Watch("r", monitor_readers, prompt_len=PROMPT, limit=50, samples=samples)


async def seen(watch: Watch, runs: Runs, *, final: bool = False) -> list[RequestOutput]:
    outputs = watch.outputs(runs.outputs(), runs.rows, text_of, runs.engage, new=runs.new, final=final)
    return [output async for output in outputs]


STOP = Monitor(PROBE, threshold=45.0, layer=1, do="stop", name="stop")


@pytest.mark.parametrize("new", [False, True])
async def test_a_text_ends_within_what_came_at_once(new) -> None:
    """The fourth of five new tokens fires: the fifth is never handed on, and vLLM's request is closed."""
    runs = Runs((0, [1], None), (0, [2, 3, 4, 5, 6], None), (0, [7], "length"), new=new)
    watch = watch_of(STOP, Monitor(PROBE, threshold=15.0, layer=1, name="note"))
    found = await seen(watch, runs)
    tokens = [token for one in found for token in one.outputs[0].token_ids] if new else found[-1].outputs[0].token_ids
    assert tokens == [1, 2, 3, 4, 5]
    texts = [one.outputs[0].text for one in found]
    assert ("".join(texts) if new else texts[-1]) == text_of([1, 2, 3, 4, 5])
    assert found[-1].finished
    assert (found[-1].outputs[0].finish_reason, found[-1].outputs[0].stop_reason) == (STOPPED, "stop")
    assert runs.closed
    stop, note = watch.reports()
    assert [(one.index, one.position, one.score) for one in stop.crossings] == [(4, PROMPT + 4, 50.0)]
    assert [one.index for one in note.crossings] == [1, 2, 3, 4]
    assert (stop.scored, note.scored, stop.stopped, note.stopped) == (5, 5, True, False)


@pytest.mark.parametrize("new", [False, True])
async def test_the_newest_token_is_not_scored(new) -> None:
    """Nor is one of a text that vLLM ends, however high its score were."""
    runs = Runs((0, [1], None), (0, [2, 9], "stop"), new=new)
    watch = watch_of(STOP)
    found = await seen(watch, runs)
    assert found[-1].outputs[0].finish_reason == "stop"
    (report,) = watch.reports()
    assert (report.scored, report.crossings, report.stopped) == (2, (), False)


@pytest.mark.parametrize("final", [False, True])
async def test_a_sample_that_has_ended_says_no_more(final) -> None:
    """The others go on; asked for the end alone, one output has them all."""
    runs = Runs((0, [5], None), (1, [1], None), (0, [6], None), (0, [7], None), (1, [2], "length"), new=False)
    watch = watch_of(STOP, samples=2)
    found = await seen(watch, runs, final=final)
    assert [one.finished for one in found] == [*[False] * (len(found) - 1), True]
    if final:
        (only,) = found
        assert [(one.index, one.token_ids) for one in only.outputs] == [(0, [5]), (1, [1, 2])]
    else:
        assert [(one.index, one.token_ids) for output in found for one in output.outputs] == [
            (0, [5]),
            (1, [1]),
            (0, [5]),
            (1, [1, 2]),
        ]
    assert [report.stopped for index in (0, 1) for report in watch.reports(index)] == [True, False]


async def test_steering_begins_once_for_each_sample() -> None:
    """Where its monitor first fires, unless the text has ended by then."""
    steer = Monitor(PROBE, threshold=15.0, layer=1, do="steer", steering=Add([0.0, 1.0], layer=1), name="steer")
    runs = Runs(
        (0, [1], None), (0, [2, 3], None), (1, [1], None), (0, [4] * 3, "length"), (1, [2, 3], "length"), new=True
    )
    watch = watch_of(steer, samples=2)
    await seen(watch, runs)
    assert runs.engaged == [[0]]
    assert (watch.steered(0), watch.steered(1)) == (PROMPT + 4, None)
    assert [report.steered_from for index in (0, 1) for report in watch.reports(index)] == [PROMPT + 4, None]


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("more", range(5))
async def test_steering_that_comes_too_late_says_so(new, more) -> None:
    """The first row that could be edited is that of `PROMPT + 4`, and the last token of a text has none: a text that
    has ended by then was not steered, and its report says that, and not a position.
    """
    steer = Monitor(PROBE, threshold=15.0, layer=1, do="steer", steering=Add([0.0, 1.0], layer=1), name="steer")
    tokens = [[1], [2, 3], [0] * (1 + more)]
    watch = watch_of(steer)
    await seen(watch, Runs((0, tokens[0], None), (0, tokens[1], None), (0, tokens[2], "length"), new=new))
    (report,) = watch.reports()
    inputs = PROMPT + sum(map(len, tokens)) - 1
    assert report.crossings
    assert (report.steered_from, report.late) == ((PROMPT + 4, False) if inputs > PROMPT + 4 else (None, True))


async def test_samples_that_fire_together_begin_together() -> None:
    """One question to the workers for all of them: none waits for another's answer."""
    steer = Monitor(PROBE, threshold=15.0, layer=1, do="steer", steering=Add([0.0, 1.0], layer=1), name="steer")
    runs = Together((0, [2], None), (0, [3], None), (0, [0, 0, 0], "length"), new=True)
    watch = watch_of(steer, samples=16)
    await seen(watch, runs)
    assert runs.engaged == [[*range(16)]]
    assert {report.steered_from for index in range(16) for report in watch.reports(index)} == {PROMPT + 3}


def test_steering_that_is_held_back_is_cut_to_its_positions() -> None:
    plan = SteeringPlan(0, b"", b"", ((Range(0, None),), (Range(1, 20, 3), Range(30, 31))), (), held=True)
    assert not scope_masks(plan.since(None).scopes, 40).any()
    whole, cut = scope_masks(plan.scopes, 40), scope_masks(plan.since(9).scopes, 40)
    assert not cut[:9].any()
    assert (cut[9:] == whole[9:]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_row_without_a_score_is_an_error(value) -> None:
    """Rather than one that does not fire."""

    class Odd(Runs):
        async def rows(self, samples: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, Arrived]:
            found = await super().rows(samples)
            for came in found.values():
                came.captures[POINT][-1] = value
            return found

    with pytest.raises(CaptureNotFinite, match="monitor 'stop' has no score at position 3"):
        await seen(watch_of(STOP), Odd((0, [1, 2], None), new=False))


async def test_products_are_scaled_to_the_probe() -> None:
    """What `project=` keeps are products with a probe at length 1; scores are those with the probe, and its bias."""
    monitor = Monitor([3.0, 4.0], threshold=0.0, layer=1, bias=0.5)
    captures = Captures({POINT: torch.tensor([[9.0, 2.0], [9.0, -1.0]])}, 4)
    monitor_reader = MonitorReader(monitor, "0", POINT, (), 1, monitor.length)
    assert monitor_reader.scores(captures).tolist() == pytest.approx([10.5, -4.5])


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**100])
def test_a_score_is_the_same_whatever_else_is_kept(size) -> None:
    """A row on the threshold: from products on the worker, and from rows. The products of probes are as exact as these."""
    probe = np.array([3, 4, -1], np.float32) * np.float32(size)
    rows = torch.tensor([[1.0, 1.0, 0.0], [-7.0, 2.5, 11.0]])
    monitor = Monitor(probe, threshold=0.0, layer=1)
    projected, (column,) = compile_probes([monitor], [POINT], {POINT: 0})
    (data,) = projected.lowered.vectors.values()
    coding, schema = Coding("projected", 1), PointSchema((3,), "float32")
    vectors = torch.frombuffer(bytearray(data), dtype=torch.float32).view(1, 3)
    encoding = ENCODINGS["projected"]
    products = encoding.decode(encoding.encode(rows, schema, coding, vectors), schema, coding)
    kept = MonitorReader(monitor, "0", POINT, (), column, monitor.power).scores(Captures({POINT: products}, 4))
    whole = MonitorReader(monitor, "0", POINT, (), None).scores(Captures({POINT: rows}, 4))
    wanted = rows.double().numpy() @ probe.astype(np.float64)
    assert kept.tolist() == whole.tolist() == wanted.tolist()


# What goes into a stream


async def test_numbers_go_out_with_the_next_event_of_their_choice() -> None:
    sent = bytearray()

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))

    call = SteercapRequest(SteercapField(), "")
    answer = AnswerSender(call, send)
    await answer({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})

    def body(*choices: int) -> dict[str, Any]:
        chunk = msgspec.json.encode({"choices": [{"index": index} for index in choices]})
        return {"type": "http.response.body", "body": b"data: " + chunk + b"\n\n", "more_body": True}

    call.live.append(Live(1, "scores", {"positions": [3]}))
    await answer(body(0))
    await answer(body(1))
    await answer(body(1))
    call.live.append(Live(0, "crossings", {"index": 7}))
    call.results.append({"choice": 0})
    await answer({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
    events = [event.removeprefix(b"data: ") for event in bytes(sent).split(b"\n\n")[:-1]]
    assert events.pop() == b"[DONE]"
    first, second, third, last = map(msgspec.json.decode, events)
    assert "steercap" not in first
    assert second["steercap"] == {"scores": [{"choice": 1, "positions": [3]}]}
    assert "steercap" not in third
    assert last["steercap"] == {"results": [{"choice": 0}], "crossings": [{"choice": 0, "index": 7}]}


def test_widths_are_those_of_the_rows() -> None:
    from steercap.steering.monitor import check_widths

    schema = PointSchema((3,), "float32")
    with pytest.raises(InvalidVector, match="width 2"):
        check_widths([Monitor(PROBE, threshold=0.0, layer=1)], [POINT], {POINT: schema})
