"""Many requests at once, with a bar that says how many are done, and few enough at a time that rows find room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from steercap.concurrency.bounded import each_of

if TYPE_CHECKING:
    from steercap.captures.handle import CaptureHandle
    from steercap.cli.prompts import Prompt
    from steercap.core.spec import CaptureSpec
    from steercap.model import SteerModel
    from steercap.requests.answers import RawOutput
    from steercap.steering.spec import SteeringSpec

#: Requests under way: more than vLLM runs at once by default, so that its batch is full.
UNDER_WAY: Final = 512
#: The same of requests that capture, whose rows stay until they are written down.
CAPTURING: Final = 32


async def run_each(
    model: SteerModel,
    prompts: Sequence[Prompt],
    params: Mapping[str, Any],
    take: Callable[[int, RawOutput | None, CaptureHandle | None], None],
    *,
    steering: SteeringSpec | None = None,
    capture: CaptureSpec | None = None,
) -> None:
    """Run prompts, each as a request of its own, and hand over each as it ends.

    Args:
        model: an open model.
        prompts: texts and conversations.
        params: fields of vLLM's SamplingParams, of which a pooling model has no use.
        take: called with the number of the prompt, its RawOutput (None of a pooling model, which reads the prompt
            alone), and a fetched handle if rows are kept, which is released afterwards.
        steering: what is changed in all of them.
        capture: what is kept of all of them; one sample each.

    Raises:
        The errors of `SteerModel.generate`, the first of them.
    """
    from steercap.lab.directions.extraction import ids_of

    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str) and prompt.special is None]
    ids_of(model.tokenizer, texts)  # which warns once of those that have special tokens already

    async def run(numbered: tuple[int, Prompt]) -> None:
        number, prompt = numbered
        special = prompt.special if prompt.special is not None else isinstance(prompt.content, str)
        asked: Any = {"capture": capture, "steering": steering, "add_special_tokens": special}
        if capture is not None and isinstance(prompt.content, str) and model.serving.here().vllm.pools:
            async with await model.read(prompt.content, **asked) as read:
                take(number, None, read)
            return
        ask: Any = model.generate if isinstance(prompt.content, str) else model.chat
        found = await ask(prompt.content, params, raw_output=True, **asked)
        if capture is None:
            take(number, found, None)
            return
        raw, handle = found
        async with handle:
            take(number, raw, handle)

    await each_of(enumerate(prompts), run, UNDER_WAY if capture is None else CAPTURING)
