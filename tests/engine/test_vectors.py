"""Extraction on a whole engine: one row a text and layer is moved, and it is the mean of the rows."""

from __future__ import annotations

import pytest
import torch
from support.rows import GREEDY, settled

from steercap.cli.demonstration import COMPLAINT, PRAISE, SENTENCES
from steercap.lab.directions import METHODS, Exchange, extract, mean_rows

HELD_OUT_WORDS = 4


def texts(words: tuple[str, ...]) -> list[str]:
    return [sentence.format(word) for word in words for sentence in SENTENCES]


#: Word by word: what is held out are words, not sentences.
GROUPS = [number for number in range(len(PRAISE)) for _ in SENTENCES]


@pytest.mark.parametrize("method", list(METHODS))
async def test_extraction_by_reductions_is_that_from_full_rows(method, smol) -> None:
    """The same vectors to float32, every layer and method; one row a text and layer comes from the worker."""
    asked = {"name": "praise", "method": method, "groups": GROUPS, "tokens": "all"}
    reduced = await extract(smol, texts(PRAISE), texts(COMPLAINT), **asked)
    full = await extract(smol, texts(PRAISE), texts(COMPLAINT), reduce=None, **asked)
    assert reduced.layers == full.layers == tuple(range(smol.num_layers))
    for layer in reduced.layers:
        one, other = reduced["praise"][layer], full["praise"][layer]
        # Two runs and two orders of summation, of rows far longer than the vector between their means; the probe's fit
        # stops where its own tolerance is met.
        assert (one - other).norm() < (1e-2 if method == "probe" else 1e-4) * other.norm()
    assert reduced.provenance.prompts == full.provenance.prompts
    assert max(reduced.provenance.auc["praise"].values()) > 0.9
    assert await settled(smol) == (0, 0, 0)


async def test_one_row_a_text_and_layer_is_moved(smol) -> None:
    """Means computed by the worker and here, and the bytes of both."""
    some = [f"{text}, and that is all there is to say about it, now and later." for text in texts(PRAISE)[:12]]
    reduced, full = await mean_rows(smol, some), await mean_rows(smol, some, reduce=None)
    torch.testing.assert_close(reduced.values, full.values, rtol=1e-4, atol=1e-4 * float(full.values.abs().max()))
    assert reduced.bytes_moved == len(some) * smol.num_layers * smol.hidden_size * 4
    tokens = sum(len(smol.tokenizer.encode(text)) - 1 for text in some)
    assert full.bytes_moved == tokens * smol.num_layers * smol.hidden_size * 4


async def test_a_text_is_read_without_its_first_token(smol) -> None:
    """The first token's row is an attention sink, ten times and more as long as a mean of the others at middle layers."""
    text = ["The weather was fine and we went out."]
    rest, whole = await mean_rows(smol, text, layers=15), await mean_rows(smol, text, layers=15, tokens="all")
    assert 10 * rest.values.norm() < whole.values.norm()


async def test_the_rows_of_an_exchange_are_those_of_its_response(smol) -> None:
    """A response read again after its prompt has the rows it had when it was generated, and its last token's too."""
    conversation = [{"role": "user", "content": "Name three colours."}]
    text, handle = await smol.chat(conversation, {"max_tokens": 12, **GREEDY}, capture_layers="all")
    await handle.fetch()
    read = await mean_rows(smol, [Exchange(conversation, handle.output_token_ids[:-1])])
    own = handle.positions >= len(handle.prompt_token_ids)
    for at, layer in enumerate(read.layers):
        known = handle.captures[layer][own].mean(0)
        assert (read.values[0, at] - known).abs().max() < 1e-4 * known.norm()
    assert text
