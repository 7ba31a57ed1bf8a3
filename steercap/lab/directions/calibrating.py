"""Calibration for codecs: statistics of the elements of a model's rows over some texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from steercap.concurrency.loops import each_of
from steercap.core.prompts import special_asked
from steercap.core.protocols import SketchingModel
from steercap.core.spec import Layers
from steercap.core.tokens import BUT_THE_FIRST, Tokens, TokenSelection
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.files.fingerprint import model_name
from steercap.lab.directions.extraction import CALL_TEXTS, CALLS, Text, check_texts, digest_of, ids_of, sha_of
from steercap.steering.calibration import Calibration


async def calibrate(
    model: SketchingModel,
    texts: Sequence[Text],
    *,
    layers: Layers = "all",
    sites: str | Sequence[str] = ("resid_post",),
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    add_special_tokens: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Measure location and spread of the elements of a model's rows over texts; no row leaves the workers.

    The texts are read unsteered, even inside `model.steered`. Inside `model.sketch` they join that sketch too, as all
    calls do.

    Args:
        model: an open model.
        texts: str, token ids, or `Exchange(prompt, response)`, which is read as a whole: some dozens that resemble the
            texts to be captured.
        layers, sites: layers and sites of the rows.
        tokens: tokens of the rows. By default all but the first, whose row in most models is an attention sink.
        add_special_tokens: argument as for `SteerModel.generate`; False for rendered chats, which have theirs.
        progress: function called with the number of texts read so far.

    Raises:
        InvalidSpec: there are no texts.
        InvalidRequest: the texts have fewer than two rows.
        CaptureNotFinite: a row holds NaN or infinity.
        The errors of `SteerModel.sketch` and `SteerModel.read`.
    """
    check_texts(texts)
    if not texts:
        raise InvalidSpec("no texts to read; give at least one")
    asked = ids_of(model.tokenizer, texts, special_asked(add_special_tokens))
    finished = 0

    async def read(part: Sequence[list[int]]) -> None:
        nonlocal finished
        await model.read([{"prompt_token_ids": ids} for ids in part], capture=None, steering=None)
        finished += len(part)
        if progress is not None:
            progress(finished)

    async with model.sketch("variances", layers=layers, sites=sites, tokens=tokens) as running:
        await each_of([asked[first : first + CALL_TEXTS] for first in range(0, len(asked), CALL_TEXTS)], read, CALLS)
        if running.rows < 2:
            raise InvalidRequest(f"these texts have {running.rows} rows at the tokens {tokens}; give two at least")
        found = await running.fetch()
    return Calibration(
        {point: found.mean(*point).float() for point in found.points},
        {point: found.variance(*point).sqrt().float() for point in found.points},
        model=model_name(model.model),
        revision=model.origin["revision"],
        dtype=found.dtype,
        tokens=str(found.tokens),
        prompts=digest_of([sha_of(ids) for ids in asked]),
        texts=len(texts),
        rows=found.rows,
    )
