"""What a user's editor infers of each call. mypy reads this file (`[tool.mypy] files`) and nobody runs it.

`assert_type` is exact: a type that changes, be it to a wider one, fails `make lint`.
"""

from __future__ import annotations

from typing import Any, assert_type

from steercap import (
    CaptureHandle,
    CaptureSpec,
    Chunk,
    Encoded,
    Generation,
    Monitor,
    MonitorReport,
    SteeringReceipt,
    SteerModel,
    sync,
)
from steercap.captures.rows import Captures

PARAMS = {"max_tokens": 8}
SPEC = CaptureSpec(layers=4)
TALK = [{"role": "user", "content": "Hello"}]

#: One text, or those of `n` samples: `n` is a value, which no type knows.
Text = str | list[str]
#: Likewise.
Handle = CaptureHandle | list[CaptureHandle]
SyncHandle = sync.CaptureHandle | list[sync.CaptureHandle]


async def one_prompt(model: SteerModel) -> None:
    """A text; with a capture, the text and its handle."""
    assert_type(await model.generate("Hello"), Text)
    assert_type(await model.generate([1, 2, 3], PARAMS, priority=1), Text)
    assert_type(await model.generate({"prompt": "Hello"}, PARAMS, steering=None), Text)
    assert_type(await model.generate("Hello", PARAMS, capture_layers=[4, 8]), tuple[Text, Handle])
    assert_type(await model.generate("Hello", PARAMS, capture_layers="all"), tuple[Text, Handle])
    assert_type(await model.generate("Hello", PARAMS, capture=SPEC), tuple[Text, Handle])


async def many_prompts(model: SteerModel) -> None:
    """Lists; None stands where a spec of its own keeps nothing."""
    assert_type(await model.generate(["Hello", "There"]), list[Text])
    assert_type(await model.generate([[1, 2], [3]], PARAMS), list[Text])
    assert_type(await model.generate(["Hello", {"prompt": "There"}, [1, 2]], [PARAMS] * 3), list[Text])
    assert_type(await model.generate(("Hello", "There"), PARAMS, capture_layers=4), tuple[list[Text], list[Handle]])
    assert_type(await model.generate(["Hello"], PARAMS, capture=SPEC), tuple[list[Text], list[Handle]])
    assert_type(
        await model.generate(["Hello", "There"], PARAMS, capture=[SPEC, None]),
        tuple[list[Text], list[Handle | None]],
    )


async def generations(model: SteerModel) -> None:
    """All that is known of each prompt, whatever is captured."""
    found = await model.run("Hello", PARAMS)
    assert_type(found, Generation)
    assert_type(found.text, str)
    assert_type(found.texts, tuple[str, ...])
    assert_type(found.handle, CaptureHandle)
    assert_type(found.handles, tuple[CaptureHandle, ...] | None)
    assert_type(found.steering, tuple[SteeringReceipt, ...] | None)
    watched = await model.run("Hello", PARAMS, monitors=[Monitor([1.0], threshold=0.0, layer=4)])
    assert_type(watched.monitors, tuple[tuple[MonitorReport, ...], ...] | None)
    assert_type(await model.run("Hello", capture_layers=4), Generation)
    assert_type(await model.run([1, 2, 3], capture=SPEC), Generation)
    assert_type(await model.run(["Hello"]), list[Generation])
    assert_type(await model.run(["Hello", [1, 2]], [PARAMS] * 2, capture=SPEC), list[Generation])
    assert_type(await model.run(["Hello"], capture=[None]), list[Generation])
    assert_type(await model.run([TALK, TALK], chat_template_kwargs={}), list[Generation])
    assert_type(await model.run(TALK), Any)


async def what_is_not_known(model: SteerModel, prompts: str | list[str], spec: CaptureSpec | None) -> None:
    """Where an argument may be either, so may what is given."""
    assert_type(await model.generate(prompts), Text | list[Text])
    assert_type(await model.generate("Hello", capture=spec), Text | tuple[Text, Handle])


async def conversations(model: SteerModel) -> None:
    """As for prompts."""
    assert_type(await model.chat(TALK, PARAMS, chat_template_kwargs={"enable_thinking": False}), Text)
    assert_type(await model.chat([TALK, TALK]), list[Text])
    assert_type(await model.chat([TALK], capture=SPEC), tuple[list[Text], list[Handle]])
    assert_type(await model.chat(TALK, capture_layers="all"), tuple[Text, Handle])
    assert_type(await model.chat([TALK], capture=[None]), tuple[list[Text], list[Handle | None]])


async def read_texts(model: SteerModel) -> None:
    """Nothing is sampled, so a prompt has one handle."""
    assert_type(await model.read("Hello"), CaptureHandle)
    assert_type(await model.read("Hello", capture_layers=4), CaptureHandle)
    assert_type(await model.read(["Hello"], capture=SPEC), list[CaptureHandle])
    assert_type(await model.read(["Hello", "There"], capture=[SPEC, None]), list[CaptureHandle | None])
    assert_type((await (await model.read("Hello")).fetch()).captures, Captures)


async def encode_texts(model: SteerModel) -> None:
    """An `Encoded` stands for a text."""
    assert_type(await model.encode("Hello"), Encoded)
    assert_type(await model.encode(["Hello"], {"task": "embed"}), list[Encoded])
    assert_type(await model.encode("Hello", capture_layers=4), tuple[Encoded, CaptureHandle])
    assert_type(await model.encode(["Hello"], capture=SPEC), tuple[list[Encoded], list[CaptureHandle]])
    assert_type(await model.encode(["Hello"], capture=[None]), tuple[list[Encoded], list[CaptureHandle | None]])


async def streams(model: SteerModel) -> None:
    """Chunks, whose rows are None where nothing is kept."""
    async for chunk in model.stream("Hello", PARAMS, capture_layers=4):
        assert_type(chunk, Chunk)
        assert_type(chunk.captures, Captures | None)


def without_await(model: sync.SteerModel) -> None:
    """The same types without `await`, with handles of the facade."""
    assert_type(model.generate("Hello"), Text)
    assert_type(model.generate(["Hello"], PARAMS), list[Text])
    assert_type(model.generate("Hello", PARAMS, capture_layers=[4]), tuple[Text, SyncHandle])
    assert_type(model.generate(["Hello"], capture=SPEC), tuple[list[Text], list[SyncHandle]])
    assert_type(model.run("Hello"), Generation[sync.CaptureHandle])
    assert_type(model.run("Hello").handle, sync.CaptureHandle)
    assert_type(model.chat(TALK, capture=SPEC), tuple[Text, SyncHandle])
    assert_type(model.read("Hello"), sync.CaptureHandle)
    assert_type(model.encode("Hello", capture=SPEC), tuple[Encoded, sync.CaptureHandle])
    assert_type(model.read(["Hello"]), list[sync.CaptureHandle])
    assert_type(model.read("Hello").fetch(), sync.CaptureHandle)
    for chunk in model.stream("Hello", PARAMS):
        assert_type(chunk, Chunk)


def what_is_refused(model: sync.SteerModel, anything: Any) -> None:
    """Arguments that no call takes. An ignored error that is none is an error: `warn_unused_ignores`."""
    model.generate("Hello", capture=[SPEC])  # type: ignore[call-overload]  # a list for a list of prompts
    model.generate("Hello", captures=SPEC)  # type: ignore[call-overload]  # no such argument
    model.generate(3)  # type: ignore[call-overload]  # no prompt
    model.generate("Hello", raw_output=True)  # type: ignore[call-overload]  # `run` gives vLLM's output
    model.generate("Hello", monitors=[])  # type: ignore[call-overload]  # `run` gives reports
    model.run(3)  # type: ignore[call-overload]  # no prompt
    assert_type(model.generate(anything, anything), Any)
