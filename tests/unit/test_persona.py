"""Personas without an engine: traits, scores, settings, and what a run folder keeps."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
import yaml

from steercap.errors import InvalidFile, InvalidSetting, JudgeFailed, UnknownName
from steercap.persona import load_trait, traits
from steercap.persona.scores import SCORERS, Scored, make_scorer
from steercap.persona.scores.judge import asked, number
from steercap.persona.scores.minilm import cross_validated, split

SHIPPED = list(traits())


# Traits


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trait_is_whole(name) -> None:
    """Five contrasting prompts, twenty questions, a dozen pairs of examples, and no example stands on both sides."""
    trait = traits()[name]
    assert len(trait.positive) == len(trait.negative) == 5
    assert len(trait.questions) >= 20
    assert len(trait.examples.positive) >= 12
    assert not set(trait.examples.positive) & set(trait.examples.negative)
    assert not set(trait.positive) & set(trait.negative)


def test_ten_traits_are_shipped() -> None:
    """They are read from the package, under the names of their files."""
    assert len(SHIPPED) == 10
    with pytest.raises(TypeError):
        traits()["mine"] = traits()[SHIPPED[0]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"questions": []}, "questions has 0 entries"),
        ({"positive": ["a", "a"]}, "positive has 'a' twice"),
        ({"negative": ["a", " "]}, "negative has an empty entry at 1"),
        ({"rubric": "How much, {answer}?"}, r"lacks \{question\}"),
        ({"keywrds": ["x"]}, "unknown field `keywrds`"),
        ({"examples": {"positive": ["a"], "negative": ["b"]}}, "examples.positive has 1 entries; give 4"),
        ({"examples": {"positive": list("abcde"), "negative": list("abcd")}}, "5 positive and 4 negative"),
        ({"name": 3}, r"Expected `str`, got `int` - at `\$.name`"),
    ],
)
def test_a_trait_that_does_not_fit_is_refused(change, says, tmp_path) -> None:
    """The error names the file and what is wrong in it."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(traits()["formal"]) | change))
    with pytest.raises(InvalidFile, match=rf"mine\.yaml.*{says}"):
        load_trait(path)


def test_a_file_that_is_no_trait_is_refused(tmp_path) -> None:
    """Missing files, broken YAML and YAML of something else are InvalidFile."""
    (tmp_path / "broken.yaml").write_text("name: [a")
    (tmp_path / "list.yaml").write_text("- a")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", "broken.yaml", "list.yaml", "bytes.yaml"):
        with pytest.raises(InvalidFile, match=name):
            load_trait(tmp_path / name)


# Scores


@pytest.mark.parametrize("name", SHIPPED)
def test_the_classifier_tells_held_out_examples_apart(name) -> None:
    """Area under the ROC curve above 0.9 for every shipped trait, both sentences of a pair left out at a time."""
    assert cross_validated(traits()[name]) > 0.9


@pytest.mark.parametrize("name", ["minilm", "keywords"])
async def test_a_scorer_tells_a_trait_from_its_opposite(name) -> None:
    """Scores are in 0 to 100, those of the trait are higher, and an answer without a word has none."""
    told = [
        Scored("How will it go?", "I am so full of hope! A wonderful chance awaits, and you will surely succeed."),
        Scored("How will it go?", "It will end in ruin. You are going to lose all your money, as everybody does."),
        Scored("How will it go?", "..."),
    ]
    high, low, none = await make_scorer(name).score(traits()["optimistic"], told)
    assert 0 <= low < 50 < high <= 100
    assert none is None


async def test_the_classifier_scores_sentences_alike_wherever_they_stand() -> None:
    """An answer's score is the mean of its sentences', whatever else is scored in the same call."""
    one, other = "It will be wonderful!", "Everything will go wrong, as it always does."
    trait, scorer = traits()["optimistic"], make_scorer("minilm")
    apart = await scorer.score(trait, [Scored("", one), Scored("", other)])
    (joined,) = await scorer.score(trait, [Scored("", f"1. {one}\n2. {other}")])
    assert joined == pytest.approx(sum(apart) / 2, abs=1e-3)  # float32, other padding


def test_text_is_split_into_sentences() -> None:
    """At the ends of sentences and of lines; list markers and lines without a word go."""
    assert split('He said "Go!" Then he left.\n\n- Dr. No\n2) two\n***') == [
        'He said "Go!',
        "Then he left.",
        "Dr.",
        "No",
        "two",
    ]


async def test_the_keyword_score_is_the_formula_stated() -> None:
    """100 (1 - exp(-n / (words * density))): a phrase counts once, parts of words do not."""
    trait = traits()["apathetic"]
    (score,) = await make_scorer("keywords", {"density": 0.1}).score(
        trait, [Scored("", "Whatever. I DON’T CARE, carefree whateverness meh")]
    )
    assert score == pytest.approx(100 * (1 - math.exp(-3 / (7 * 0.1))))


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("nobody", {}, UnknownName),
        ("keywords", {"density": 0}, InvalidSetting),
        ("keywords", {"dense": 1}, InvalidSetting),
        ("minilm", {"sentences": "yes"}, InvalidSetting),
        ("judge", {}, InvalidSetting),
        ("judge", {"base_url": "http://x", "model": "m", "concurrency": 0}, InvalidSetting),
    ],
)
def test_a_scorer_that_cannot_be_made_is_refused(name, arguments, error) -> None:
    """Unknown names and arguments are errors that name them."""
    with pytest.raises(error, match=name if error is UnknownName else "|".join([*arguments, "base_url"])):
        make_scorer(name, arguments)


# The judge


def reply(text: str, tops: dict[str, float] | None = None) -> dict:
    """A chat completion of one choice, with the candidates for its first token."""
    choice = {"message": {"role": "assistant", "content": text}}
    if tops is not None:
        found = [{"token": token, "logprob": math.log(share)} for token, share in tops.items()]
        choice["logprobs"] = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": found}]}
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("text", "tops", "score"),
    [
        ("80", {"80": 0.5, " 60": 0.25, "no": 0.25}, (80 * 0.5 + 60 * 0.25) / 0.75),
        ("85", {"8": 0.9, "7": 0.1}, 85.0),  # digits: beginnings of numbers, not numbers
        ("REFUSAL", {"REFUSAL": 0.9, "80": 0.1}, None),
        ("I would say 70 of 100.", {"I": 0.9}, 70.0),
        ("72.5", None, 72.5),
        ("101", None, None),
        ("-5", None, None),
        ("no number", None, None),
        ("999", {"999": 0.5, "90": 0.5}, 90.0),
    ],
)
def test_a_judges_answer_is_a_number_or_none(text, tops, score) -> None:
    """The mean under the candidates where these are whole numbers, the number in the words otherwise, or None."""
    assert number(reply(text, tops)["choices"][0]) == (score if score is None else pytest.approx(score))


def test_braces_in_an_answer_mean_nothing() -> None:
    """What is judged is put into the rubric as it stands."""
    prompt = asked(traits()["formal"], Scored("{answer}", "{question} {0}"))
    assert "Question: {answer}\nAnswer: {question} {0}\n" in prompt


@contextmanager
def endpoint(*answers: tuple[int, dict]) -> Iterator[tuple[str, list[dict]]]:
    """A server that gives these answers in turn, the last one again and again, and keeps what it was asked."""
    left, heard = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            heard.append(body | {"path": self.path, "key": self.headers.get("authorization")})
            status, answer = left.pop(0) if len(left) > 1 else left[0]
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_judge_is_asked_again_when_it_is_busy(monkeypatch) -> None:
    """Status 429 and 5xx are tried again; the rubric and the key of the environment variable named are sent."""
    monkeypatch.setenv("MY_JUDGE", "word")
    with endpoint((429, {}), (503, {}), (200, reply("40", {"40": 1.0}))) as (url, heard):
        judge = make_scorer("judge", {"base_url": url, "model": "m", "backoff": 0.0, "api_key_env": "MY_JUDGE"})
        assert await judge.score(traits()["formal"], [Scored("Why?", "Because.")]) == [pytest.approx(40)]
    assert len(heard) == 3
    assert "Question: Why?\nAnswer: Because." in heard[0]["messages"][0]["content"]
    assert heard[0]["path"] == "/v1/chat/completions"
    assert heard[0]["key"] == "Bearer word"


@pytest.mark.parametrize(
    ("answer", "says", "calls"),
    [
        ((500, {}), "2 attempts", 2),
        ((401, {"error": "no key"}), "refuses.*no key", 1),
        ((200, {"choices": []}), "no chat completion", 1),
    ],
)
async def test_a_judge_that_fails_is_an_error(answer, says, calls) -> None:
    """No score is made up: the error says what the endpoint said."""
    with endpoint(answer) as (url, heard):
        judge = make_scorer("judge", {"base_url": url, "model": "m", "backoff": 0.0, "retries": 1})
        with pytest.raises(JudgeFailed, match=says):
            await judge.score(traits()["formal"], [Scored("Why?", "Because.")])
    assert len(heard) == calls


async def test_a_judge_that_is_not_there_is_an_error() -> None:
    """A closed port is JudgeFailed, with the address."""
    with endpoint((200, {})) as (url, _):
        pass
    with pytest.raises(JudgeFailed, match=url):
        await make_scorer("judge", {"base_url": url, "model": "m", "retries": 0}).score(
            traits()["formal"], [Scored("", "a")]
        )


def test_a_key_is_not_shown() -> None:
    """The repr of a judge, as it stands in errors, holds no key."""
    assert "secret" not in repr(make_scorer("judge", {"base_url": "u", "model": "m", "api_key": "secret"}))


def test_every_scorer_is_documented() -> None:
    """A scorer says what its numbers mean."""
    assert all("score" in scorer.__doc__ or "mean" in scorer.__doc__ for scorer in SCORERS.values())
