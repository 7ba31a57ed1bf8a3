"""Runner of many requests, with a limit on those under way so that rows find room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steercap.concurrency.bounded import each_of

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle
    from steercap.cli.prompts import Prompt
    from steercap.core.spec import CaptureSpec
    from steercap.model import SteerModel
    from steercap.requests.call_types import Generation
    from steercap.steering.spec import SteeringSpec

#: Maximum requests under way: more than vLLM runs at once by default, so that its batch is full.
UNDER_WAY: Final = 512
#: Maximum requests under way that capture, whose rows stay until they are written.
CAPTURING: Final = 32


async def run_each(
    model: SteerModel,
    prompts: Sequence[Prompt],
    params: Mapping[str, Any],
    take: Callable[[int, Generation | None, CaptureHandle | None], None],
    *,
    steering: SteeringSpec | None = None,
    capture: CaptureSpec | None = None,
) -> None:
    """Run prompts as one request each, and pass each result on as the request ends.

    Args:
        model: an open model.
        prompts: texts and conversations.
        params: fields of vLLM's SamplingParams; unused by a pooling model.
        take: called with the number of the prompt, its Generation (None for a pooling model, which only reads it),
            and a fetched handle if rows are kept, which is released afterwards.
        steering: edits of all requests.
        capture: capture spec of all requests, with one sample each.

    Raises:
        The errors of `SteerModel.generate`, the first of them.
    """
    from steercap.lab.directions.extraction import ids_of

    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str) and prompt.special is None]
    ids_of(model.tokenizer, texts)  # warns once about texts that have special tokens already

    async def run(numbered: tuple[int, Prompt]) -> None:
        number, prompt = numbered
        special = prompt.special if prompt.special is not None else isinstance(prompt.content, str)
        asked: Any = {"capture": capture, "steering": steering, "add_special_tokens": special}
        if capture is not None and isinstance(prompt.content, str) and model.serving.here().vllm.pools:
            async with await model.read(prompt.content, **asked) as read:
                take(number, None, read)
            return
        found: Generation = await model.run(prompt.content, params, **asked)
        if capture is None:
            take(number, found, None)
            return
        async with found.handle as handle:
            take(number, found, handle)

    await each_of(enumerate(prompts), run, UNDER_WAY if capture is None else CAPTURING)
