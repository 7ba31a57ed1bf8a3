"""Scorer that asks a judging model at an OpenAI-compatible endpoint, with the trait's rubric."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steercap.concurrency.loops import each_of, scoped
from steercap.core.chat import content_text
from steercap.core.extras import extra
from steercap.core.hints import dataclass
from steercap.core.values import flag_of, index_of, number_of, shown
from steercap.errors import InvalidSetting, JudgeFailed
from steercap.lab.measures.scores import Scored, Scorer, Trait

if TYPE_CHECKING:
    import httpx

#: Maximum tokens of a judge's reply: a number, or a few words around one.
REPLY_TOKENS: Final = 16
#: Number of candidates requested for each token, with probabilities: the maximum of OpenAI's interface.
CANDIDATES: Final = 20
#: Minimum total probability of numbers for a score by probabilities. Source: Chen et al., Persona Vectors.
LEAST_MASS: Final = 0.25
#: Mentions of the scale, such as "0-100", which are not scores.
SCALE: Final = re.compile(r"(?<![\d.,\-])0\s*(?:-|–|—|\bto\b)\s*100(?![\d.,]*\d)", re.IGNORECASE)
#: Mention of the maximum after a score, such as "/100".
OF_WHAT: Final = re.compile(r"(?<=\d)\s*(?:/|(?:out )?of)\s*(?:100(?![\d.,]*\d)|(?:a|one) hundred\b)", re.IGNORECASE)
#: Beginning of a range after its first number, or of the maximum after a score.
_UNTIL: Final = r"[/\-\u2010-\u2015\u2212]|\bto\b|(?:\bout )?\bof\b"
#: Another scale after its first number, in words: "8 out of ten", "4 stars".
_OTHER: Final = r"\s*(?:(?:/|\b(?:out )?of\b)\s*[a-z]|stars?\b)"
#: Whole number at the beginning of a reply that is not part of a word, a longer number, another scale or a range.
NUMBER: Final = re.compile(
    rf"\s*([0-9]{{1,3}})(?!\d|\.\d|,\s*\d|(?!(?:pts?|points?|percent)\b)[a-z]|\s*(?:{_UNTIL})\s*\d|{_OTHER})",
    re.IGNORECASE,
)
#: Text before a number that is a maximum: "eighty out of 100"; not that of "a score of 80".
MAXIMUM: Final = re.compile(
    r"(?:/|(?:\A|(?<!score)(?<!rating)(?<!grade)(?<!value)(?<!mark)(?<!level)\s)of\b)\s*\Z", re.IGNORECASE
)
#: Text before a number that is named as the score: that of a reply which was cut off may be of anything else.
NAMED: Final = re.compile(
    r"(?:\A|\b(?:score|rat(?:e|ing)|grade|value|mark|evaluation|give)\b"
    r"(?:\W+(?:it|this|the|an?|answer|response|score|rating|as|at|is|of|about|around|would|be)\b){0,6})\W*\Z",
    re.IGNORECASE,
)
#: First mark of a numbered list, at the beginning of a reply that was cut off.
LISTED: Final = re.compile(r"\W*1[.)]\s")
#: Thoughts of a judge, which are no part of its reply; their beginning may be in the chat template, their end cut off.
THOUGHTS: Final = re.compile(r"\A.*</think(?:ing)?>|<think(?:ing)?>.*\Z", re.IGNORECASE | re.DOTALL)
#: End of a reply that was cut off where its number, or a range or the maximum after it, may have gone on.
CUT: Final = re.compile(rf"\d(?:[.,]|\s*(?:{_UNTIL}|\bout\b)\s*)?\Z", re.IGNORECASE)
#: Number with its sign; the word that it ends, as in "CO2"; and the one that it begins, as in "1st".
FIGURES: Final = re.compile(r"([a-z]*_?)([-\u2010-\u2013\u2212]?\d(?:[\d.,]*\d)?)([a-z]*)", re.IGNORECASE)
#: Words that may be written in one with a score, before and after it.
JOINED: Final = ("score", "rating"), ("pt", "pts", "point", "points", "percent")
#: Beginning of a reply that says that the answer refuses.
REFUSES: Final = re.compile(r"\W*REFUS(?:AL|ED|ES)\b", re.IGNORECASE)
#: Maximum wait before a retry, in seconds.
LONGEST_WAIT: Final = 60.0


class Judgement(msgspec.Struct, frozen=True):
    """Judge's reply about one answer, and the score in it.

    Args:
        score: score of the answer, 0 to 100; None if the answer refuses, or the reply has no score.
        refused: True if the judge says that the answer refuses: its reply begins with REFUSAL.
        reply: text of the reply.
    """

    score: float | None
    refused: bool
    reply: str


@dataclass(frozen=True)
class Judge(Scorer):
    """Scorer by a judging model: the mean of the numbers 0 to 100 under its probabilities for its reply's first token.

    Source: Chen et al., Persona Vectors. Probabilities count only if the reply begins with a whole number in one token.
    If not ("8" and "5" are two tokens of 85), or if the server gives no probabilities, the score is the one number in
    the reply, alone or before "/100", "%", "out of 100"; the scale itself ("0-100", "0 to 100") does not count. None if
    there is no number, several ("8/10"), one outside 0 to 100, in a word ("CO2"), of another scale ("8 out of ten") or
    that may have been cut off, or the reply is REFUSAL, as a rubric may ask for. If the reply was cut off, a number
    counts only at its beginning, after a word such as "score" or "rate", or before "/100". Text in <think> tags is no
    reply.

    Args:
        base_url: URL of the endpoint, such as "https://api.openai.com/v1".
        model: name of the judging model at the endpoint.
        api_key: key sent as bearer token; "" for that in the environment, if set.
        api_key_env: name of the environment variable with the key.
        concurrency: maximum concurrent calls.
        retries: maximum retries after status 429 or 5xx, or no response.
        backoff: maximum seconds before the second attempt; doubled for each further one, unless the server says.
        timeout: maximum seconds of an attempt.
        logprobs: True to request probabilities, which some servers refuse.

    Raises:
        InvalidSetting: a value is not valid.
        JudgeFailed: when scoring, if the endpoint refuses, cannot be reached, or answers in another form.
    """

    effort = frozenset({"api_key_env", "concurrency", "retries", "backoff", "timeout"})

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    api_key_env: str = "STEERCAP_JUDGE_API_KEY"
    concurrency: int = 16
    retries: int = 5
    backoff: float = 1.0
    timeout: float = 60.0
    logprobs: bool = True

    def __post_init__(self) -> None:
        for name in ("base_url", "model", "api_key", "api_key_env"):
            if not isinstance(getattr(self, name), str):
                raise InvalidSetting(f"{name}={shown(getattr(self, name))}; give text")
        keep = object.__setattr__
        for name, kind, what in (
            ("concurrency", index_of, "a whole number"),
            ("retries", index_of, "a whole number"),
            ("backoff", number_of, "seconds"),
            ("timeout", number_of, "seconds"),
            ("logprobs", flag_of, "true or false"),
        ):
            found = kind(getattr(self, name))
            if found is None or (isinstance(found, float) and not math.isfinite(found)):
                raise InvalidSetting(f"{name}={shown(getattr(self, name))}; give {what}")
            keep(self, name, found)
        if self.concurrency < 1 or self.retries < 0 or self.backoff < 0 or self.timeout <= 0:
            raise InvalidSetting(
                f"{self}; concurrency is 1 or more, retries and backoff are 0 or more, timeout is more than 0"
            )

    @property
    def key(self) -> str:
        usual: dict[str, Any] = {one.name: one.default for one in fields(self) if one.name in self.effort}
        return repr(replace(self, **usual))

    async def score(self, trait: Trait, exchanges: Sequence[Scored]) -> list[float | None]:
        return [one.score for one in await self.judge(trait.rubric, exchanges)]

    async def judge(self, rubric: str, exchanges: Sequence[Scored]) -> list[Judgement]:
        """Ask the judging model about each answer, concurrently; return the judgements in order.

        Args:
            rubric: prompt with placeholders {question} and {answer}.
            exchanges: questions and answers to judge.

        Raises:
            JudgeFailed: the endpoint refuses, cannot be reached, or answers in another form.
        """
        with extra("personas"):
            import httpx
        key = self.api_key or os.environ.get(self.api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(headers=headers, timeout=self.timeout) as client:

            async def one(exchange: Scored) -> Judgement:
                return judgement(await self._reply(client, filled_rubric(rubric, exchange)))

            return await each_of(exchanges, one, self.concurrency)

    async def _reply(self, client: httpx.AsyncClient, prompt: str) -> Mapping[str, Any]:
        """Send a prompt, with retries, and return the first choice of the endpoint's answer, or raise JudgeFailed."""
        with extra("personas"):
            from httpx import TransportError
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": REPLY_TOKENS,
        }
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": CANDIDATES}
        url, trouble = f"{self.base_url.rstrip('/')}/chat/completions", ""
        for attempt in range(self.retries + 1):
            wait = min(self.backoff * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1.0)  # noqa: S311 -- no secret
            try:
                answer = await scoped(lambda: client.post(url, json=body))
            except TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return _choice(url, answer)
                trouble = f"status {answer.status_code}: {answer.text[:300]}"
                if answer.status_code != 429 and answer.status_code < 500:
                    raise JudgeFailed(f"{url} refuses the question: {trouble}")
                wait = _retry_seconds(answer, wait)
            if attempt < self.retries:
                await asyncio.sleep(wait)
        raise JudgeFailed(
            f"{url} did not answer in {self.retries + 1} attempts; the last: {trouble}; check that it runs, or lower "
            "concurrency="
        )


def filled_rubric(rubric: str, exchange: Scored) -> str:
    """Return a rubric with question and answer filled in; placeholders in these are kept literally."""
    filled = {"{question}": exchange.question, "{answer}": exchange.answer}
    return re.sub(r"\{question\}|\{answer\}", lambda place: filled[place[0]], rubric)


def judgement(choice: Mapping[str, Any]) -> Judgement:
    """Return the judgement in a choice of the endpoint's chat completion; see `Judge` for the rule."""
    # A judge that refuses itself may say so in a field of its own; that is no score, and no refusal of the answer's.
    reply = content_text(choice["message"])
    if not reply:
        return Judgement(None, refused=False, reply=str(choice["message"].get("refusal") or ""))
    said, cut = THOUGHTS.sub("", reply), choice.get("finish_reason") == "length"
    if REFUSES.match(said):
        return Judgement(None, refused=True, reply=reply)
    first = ((choice.get("logprobs") or {}).get("content") or [{}])[0]
    begins = None if cut and LISTED.match(said) else NUMBER.match(_without_scale(said))
    whole = begins is not None and begins[1] == str(first.get("token")).strip()
    score = _expected(first.get("top_logprobs") or []) if whole else None
    return Judgement(_only_number(said, cut=cut) if score is None else score, refused=False, reply=reply)


def _without_scale(text: str) -> str:
    return OF_WHAT.sub(" ", SCALE.sub(" ", text))


def _only_number(text: str, *, cut: bool) -> float | None:
    """Return the only number in a reply, if it is a score from 0 to 100; else None. `cut`: True if more was to come."""
    plain = _without_scale(text)
    numbers = list(FIGURES.finditer(plain))
    if len(numbers) != 1 or (cut and CUT.search(plain)):
        return None
    (found,), (names, units) = numbers, JOINED
    before, number, after = found.groups()
    if MAXIMUM.search(plain[: found.start(2)]) or re.match(_OTHER, plain[found.end(2) :], re.IGNORECASE):
        return None
    named = NAMED.search(plain[: found.start(2)]) and not LISTED.match(text)
    if cut and not named and not OF_WHAT.search(SCALE.sub(" ", text)):
        return None
    whole = before.strip("_").lower() in {"", *names} and after.lower() in {"", *units}
    return float(number) if whole and re.fullmatch(r"\d+(?:\.\d+)?", number) and float(number) <= 100 else None


def _expected(candidates: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean, by probability, of the numbers 0 to 100 among a token's candidates.

    None if their total probability is below `LEAST_MASS`, or if all are digits, which may begin longer numbers.
    """
    mass: dict[int, float] = {}
    for candidate in candidates:
        text = str(candidate["token"]).strip()
        if re.fullmatch(r"[0-9]{1,3}", text) and int(text) <= 100:
            mass[int(text)] = mass.get(int(text), 0.0) + math.exp(candidate["logprob"])
    total = sum(mass.values())
    # Digits alone may be the beginnings of longer numbers; a number of two digits shows that numbers are whole.
    if total < LEAST_MASS or max(mass) < 10:
        return None
    return sum(value * share for value, share in mass.items()) / total


def _choice(url: str, answer: httpx.Response) -> Mapping[str, Any]:
    try:
        choice: Mapping[str, Any] = answer.json()["choices"][0]
        _ = choice["message"]["content"], content_text(choice["message"])
    except (ValueError, LookupError, TypeError) as error:
        raise JudgeFailed(f"{url} did not answer with a chat completion, but with {answer.text[:300]!r}") from error
    return choice


def _retry_seconds(answer: httpx.Response, otherwise: float) -> float:
    """Return the seconds that the server asks to wait, at most `LONGEST_WAIT`; `otherwise` if it does not."""
    try:
        return min(float(answer.headers["retry-after"]), LONGEST_WAIT)
    except (KeyError, ValueError):
        return otherwise


MEMBER = Judge
