"""Personas without an engine: traits, scores, settings, and what a run folder keeps."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from cli_calls import call
from rich.console import Console
from support.examples import cross_validated

from steercap import Progress
from steercap.cli.persona import left_out_of, table_of
from steercap.config import Settings
from steercap.core.protocols import Count
from steercap.core.spec import Point
from steercap.engine.compiler import Compiler
from steercap.errors import (
    InvalidFile,
    InvalidRequest,
    InvalidSetting,
    InvalidSpec,
    JudgeFailed,
    LayerOutOfRange,
    PointNotArmed,
    RunDiffers,
    RunUnfinished,
    TooFewKept,
    UnknownName,
)
from steercap.files.base import write_tensors
from steercap.files.tables import TableWriter, read_table, write_table
from steercap.lab.demo import smollm2
from steercap.lab.directions import Contrast, chance_band
from steercap.lab.directions.contrast import directions_of
from steercap.lab.measures.scores import SCORERS, Scored, make_scorer
from steercap.lab.measures.scores.judge import filled_rubric, judgement
from steercap.lab.measures.scores.minilm import split
from steercap.lab.personas import PersonaSettings, load_trait, run_persona, shipped_traits, write_levels
from steercap.lab.personas.capture import VERSION, AnswerRowsHeader, capture, load_rows, room_of, rows_file, vectors
from steercap.lab.personas.folder import RUN, StageFolder, check_same, open_folder
from steercap.lab.personas.generate import AnswerGroup, answer_groups, answer_ids, ends_of, generate
from steercap.lab.personas.pipeline import PersonaResult, check
from steercap.lab.personas.records import SIGNS, Records, Response, Score, all_requests
from steercap.lab.personas.report import outcomes, write_report
from steercap.lab.personas.score import keep, score
from steercap.lab.personas.settings import DEPENDS, STAGES, described, stage_hashes
from steercap.steering import DirectionSet

SHIPPED = list(shipped_traits())


# Traits


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trait_is_whole(name) -> None:
    """Five contrasting prompts, twenty questions, a dozen pairs of examples, and no example stands on both sides."""
    trait = shipped_traits()[name]
    assert len(trait.positive) == len(trait.negative) == 5
    assert len(trait.questions) >= 20
    assert len(trait.examples.positive) >= 12
    assert not set(trait.examples.positive) & set(trait.examples.negative)
    assert not set(trait.positive) & set(trait.negative)


def test_ten_traits_are_shipped() -> None:
    """They are read from the package, under the names of their files."""
    assert len(SHIPPED) == 10
    with pytest.raises(TypeError):
        shipped_traits()["mine"] = shipped_traits()[SHIPPED[0]]


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
        ({"name": "very/formal"}, "name='very/formal'; give one word"),
        ({"name": 3}, r"Expected `str`, got `int` - at `\$.name`"),
    ],
)
def test_a_trait_that_does_not_fit_is_refused(change, says, tmp_path) -> None:
    """The error names the file and what is wrong in it."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(shipped_traits()["formal"]) | change))
    with pytest.raises(InvalidFile, match=rf"mine\.yaml.*{says}"):
        load_trait(path)


def test_a_key_that_a_trait_has_twice_is_refused(tmp_path) -> None:
    """YAML would read the last of them, and half of the questions would be gone without a word."""
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(shipped_traits()["formal"])) + "questions: [Why?]\n")
    with pytest.raises(InvalidFile, match=r"mine\.yaml has 'questions' \(line \d+\) twice in one mapping"):
        load_trait(path)


def test_a_file_that_is_no_trait_is_refused(tmp_path) -> None:
    """Missing files, broken YAML and YAML of something else are InvalidFile."""
    (tmp_path / "broken.yaml").write_text("name: [a")
    (tmp_path / "list.yaml").write_text("- a")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "date.yaml").write_text("name: 2026-13-13")
    for name in ("none.yaml", "broken.yaml", "list.yaml", "bytes.yaml", "date.yaml"):
        with pytest.raises(InvalidFile, match=name):
            load_trait(tmp_path / name)


# Scores


@pytest.mark.parametrize("name", SHIPPED)
def test_the_classifier_tells_held_out_examples_apart(name) -> None:
    """Area under the ROC curve above 0.9 for every shipped trait, both sentences of a pair left out at a time."""
    assert cross_validated(shipped_traits()[name]) > 0.9


@pytest.mark.parametrize("name", ["minilm", "keywords"])
async def test_a_scorer_tells_a_trait_from_its_opposite(name) -> None:
    """Scores are in 0 to 100, those of the trait are higher, and an answer without a word has none."""
    told = [
        Scored("How will it go?", "I am so full of hope! A wonderful chance awaits, and you will surely succeed."),
        Scored("How will it go?", "It will end in ruin. You are going to lose all your money, as everybody does."),
        Scored("How will it go?", "..."),
    ]
    high, low, none = await make_scorer(name).score(shipped_traits()["optimistic"], told)
    assert 0 <= low < 50 < high <= 100
    assert none is None


@pytest.mark.parametrize("keyword", ["can't wait", "can’t wait", "can't\n  wait"])
@pytest.mark.parametrize("answer", ["I can't wait!", "I can’t wait!", "I can't\nwait!", "I  CAN’T \t wait!"])
async def test_a_keyword_is_found_however_it_is_typed(keyword, answer) -> None:
    """With either apostrophe and any space, in the trait and in the answer: one in three words."""
    trait = msgspec.structs.replace(shipped_traits()["optimistic"], keywords=(keyword,))
    (found,) = await make_scorer("keywords", {"density": 1 / 3}).score(trait, [Scored("", answer)])
    assert found == pytest.approx(100 * (1 - math.exp(-1)))
    assert await make_scorer("keywords").score(trait, [Scored("", "I cant wait")]) == [0]


async def test_the_classifier_scores_sentences_alike_wherever_they_stand() -> None:
    """An answer's score is the mean of its sentences', whatever else is scored in the same call."""
    one, other = "It will be wonderful!", "Everything will go wrong, as it always does."
    trait, scorer = shipped_traits()["optimistic"], make_scorer("minilm")
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
    trait = shipped_traits()["apathetic"]
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
        ("REFUSAL", {"REFUSAL": 0.6, "80": 0.4}, None),  # though numbers have enough of the probability
        ("I would say 70 of 100.", {"I": 0.9}, 70.0),
        ("72.5", None, 72.5),
        ("101", None, None),
        ("-5", None, None),
        ("no number", None, None),
        ("999", {"999": 0.5, "90": 0.5}, 90.0),
        ("9/10", {"9": 0.6, "10": 0.3, "8": 0.1}, None),  # whatever the candidates are
        ("10-20", {"10": 0.9, "15": 0.1}, None),
        ("85/100", None, 85.0),
        ("Score: 85%.", None, 85.0),
        ("I rate it 85 out of 100.", None, 85.0),
        ("Score (0-100): 85", None, 85.0),
        ("On a scale from 0 to 100, I say 85", None, 85.0),
        ("100", None, 100.0),
        ("8/10", None, None),  # of another scale
        ("8 out of 10", None, None),
        ("80-90", None, None),
        ("0-100", None, None),
        ("1. The answer is formal: 85", None, None),
        ("85 of 1000", None, None),
        ("1,000", None, None),
        ("The answer to Q1 shows none", None, None),
        ("CO2 is mentioned, no trait", None, None),
        ("H2O", None, None),
        ("rule_3", None, None),
        ("v1.5", None, None),
        ("1st", {"1": 0.5, "10": 0.5}, None),
        ("\N{EN DASH}5", None, None),
        ("8/10th", None, None),
        ("Score85", None, 85.0),
        ("85pts", None, 85.0),
        ("_85_", None, 85.0),
        ("Score\N{EM DASH}85", None, 85.0),
        ("85.The answer is formal", None, 85.0),
        ("Eighty out of 100", None, None),  # the maximum, not the score
        ("Seven/10", None, None),
        ("Out of 100, a high one", None, None),
        ("8 out of ten", {"8": 0.6, "10": 0.4}, None),
        ("4 stars", {"4": 0.6, "10": 0.4}, None),
        ("a score of 85", None, 85.0),
        ("a mark of 85 out of a hundred", None, 85.0),
        ("<think>\n2 sentences, all formal.\n</think>\n\n85", None, 85.0),
        ("It has 2 sentences.</think>85", None, 85.0),  # where the chat template begins the thoughts
        ("<think>It has 2 sentences.</think>High", None, None),
        ("\u5f9785\u5206", None, 85.0),  # points, in Chinese
    ],
)
def test_a_judges_answer_is_a_number_or_none(text, tops, score) -> None:
    """The mean under the candidates where these are whole numbers, the only number in the words otherwise, or None."""
    found = judgement(reply(text, tops)["choices"][0])
    assert found.score == (score if score is None else pytest.approx(score))
    assert (found.reply, found.refused) == (text, text.startswith("REFUSAL"))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("80\n\nThe answer shows 3 traits", 84.0),
        ("80 (on a scale of 1 to 10)", 84.0),
        ("80 out of 100. 3 reasons", 84.0),
        ("80.", 84.0),
        ("80 of 90", None),
        ("80 \u2013 90", None),
        ("80,5", None),
        ("80th", None),
        ("80pts", 84.0),
    ],
)
def test_a_whole_number_first_is_weighted_whatever_follows(text, score) -> None:
    """But for what makes it a part of a number, a range, or of another scale."""
    choice = reply(text, {"80": 0.8, "100": 0.2})["choices"][0]
    choice["logprobs"]["content"][0]["token"] = "80"
    assert judgement(choice).score == (score if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    ("text", "first", "score"), [("100", "10", 100.0), ("7.5", "7", 7.5), ("Score: 85", "Score", 85.0)]
)
def test_candidates_of_a_part_of_the_number_do_not_count(text, first, score) -> None:
    """They are for the first token, which the tokenizer may have cut off a longer number."""
    choice = reply(text, {first: 0.6, "20": 0.4})["choices"][0]
    choice["logprobs"]["content"][0]["token"] = first
    assert judgement(choice).score == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("I would rate this answer with a score of 8", None),
        ("It fully shows the trait, so I give 10", None),
        ("I would say 85.", None),
        ("I would say 8/", None),
        ("I would say 80 to", None),
        ("I would say 8 out of", None),
        ("I would say 85/100", 85.0),
        ("I would say 85 out of 100.", 85.0),
        ("85 on the scale of 0-100", 85.0),
        ("85, since the answer", 85.0),
        ("85\n", 85.0),
        ("**Score:** 85. The answer is", 85.0),
        ("I give it a score of 85 because", 85.0),
        ("I would rate this response 85 because", 85.0),
        ("I'd give it a rating of about 85, since", 85.0),
        ("Evaluation: 85, as the answer", 85.0),
    ],
)
def test_a_number_that_the_limit_may_have_cut_is_no_score(text, score) -> None:
    """Where the reply ends for another reason, its last number is whole."""
    choice = reply(text)["choices"][0]
    assert judgement(choice | {"finish_reason": "length"}).score == score
    assert judgement(choice | {"finish_reason": "stop"}).score is not None


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nThe answer has 2 sentences and",
        "The answer gives 3 examples of formal",
        "1. **Read the answer**: it is",
        "On a scale of 100, the answer is",
    ],
)
def test_a_number_before_the_score_is_no_score(text) -> None:
    """The limit cut the reply before its score: what it counted first is of something else."""
    choice = reply(text, {"1": 0.7, "10": 0.3})["choices"][0] | {"finish_reason": "length"}
    choice["logprobs"]["content"][0]["token"] = text[0]
    assert judgement(choice).score is None


def test_what_a_judge_says_in_place_of_an_answer_is_no_judgement() -> None:
    """Its own refusal is told in a field of its own: neither a score, nor a refusal of what it was to judge."""
    for text in ("I cannot rate this (see rule 3).", "Refused."):
        found = judgement({"message": {"role": "assistant", "content": None, "refusal": text}})
        assert (found.score, found.refused, found.reply) == (None, False, text)


def test_a_judge_may_answer_in_parts() -> None:
    """A content of several parts is its texts, not a list as Python writes it."""
    parts = [{"type": "text", "text": "REFUSAL"}, {"type": "text", "text": "It was declined."}]
    found = judgement({"message": {"role": "assistant", "content": parts}})
    assert (found.refused, found.reply) == (True, "REFUSAL\nIt was declined.")
    found = judgement({"message": {"role": "assistant", "content": [{"type": "text", "text": "7.5"}]}})
    assert (found.score, found.refused, found.reply) == (7.5, False, "7.5")


def test_braces_in_an_answer_mean_nothing() -> None:
    """What is judged is put into the rubric as it stands."""
    prompt = filled_rubric(shipped_traits()["formal"].rubric, Scored("{answer}", "{question} {0}"))
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
        assert await judge.score(shipped_traits()["formal"], [Scored("Why?", "Because.")]) == [pytest.approx(40)]
    assert len(heard) == 3
    assert "Question: Why?\nAnswer: Because." in heard[0]["messages"][0]["content"]
    assert heard[0]["path"] == "/v1/chat/completions"
    assert heard[0]["key"] == "Bearer word"


@pytest.mark.parametrize(
    ("answer", "says", "calls"),
    [
        ((500, {}), "2 attempts", 2),
        ((401, {"error": "no key"}), "refuses.*no key", 1),
        ((200, {"choices": []}), "did not answer with a chat completion", 1),
        ((200, {"choices": [{"message": {"content": [{"type": "image_url"}]}}]}), "not answer with a chat", 1),
    ],
)
async def test_a_judge_that_fails_is_an_error(answer, says, calls) -> None:
    """No score is made up: the error says what the endpoint said."""
    with endpoint(answer) as (url, heard):
        judge = make_scorer("judge", {"base_url": url, "model": "m", "backoff": 0.0, "retries": 1})
        with pytest.raises(JudgeFailed, match=says):
            await judge.score(shipped_traits()["formal"], [Scored("Why?", "Because.")])
    assert len(heard) == calls


async def test_a_judge_that_is_not_there_is_an_error() -> None:
    """A closed port is JudgeFailed, with the address."""
    with endpoint((200, {})) as (url, _):
        pass
    with pytest.raises(JudgeFailed, match=url):
        await make_scorer("judge", {"base_url": url, "model": "m", "retries": 0}).score(
            shipped_traits()["formal"], [Scored("", "a")]
        )


def test_a_key_is_not_shown() -> None:
    """The repr of a judge, as it stands in errors, holds no key."""
    assert "secret" not in repr(make_scorer("judge", {"base_url": "u", "model": "m", "api_key": "secret"}))


def test_every_scorer_is_documented() -> None:
    """A scorer says what its numbers mean."""
    assert all("score" in scorer.__doc__ or "mean" in scorer.__doc__ for scorer in SCORERS.values())


# Settings


def made(**changes) -> PersonaSettings:
    """Settings of two traits with two prompts, three questions, two samples: 48 requests."""
    sizes = {"n_prompts": 2, "n_questions": 3, "samples": 2, "min_kept": 2}
    return PersonaSettings(**{"traits": ("formal", "poetic"), **sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"traits": ("formal", "formel")}, InvalidSetting, r"unknown traits \['formel'\].*'formal'"),
        ({"traits": ()}, InvalidSetting, "at least one"),
        ({"traits": ("formal", shipped_traits()["formal"])}, InvalidSetting, "each once"),
        ({"samples": 0}, InvalidSetting, "samples=0; give 1"),
        ({"n_questions": 1}, InvalidSetting, "n_questions=1; give 2"),
        ({"held_out": 0.0}, InvalidSetting, "held_out=0.0"),
        ({"method": "guess"}, UnknownName, "'guess'"),
        ({"scorer": "guess"}, UnknownName, "'guess'"),
        ({"scorer_args": {"api_key": "secret"}}, InvalidSetting, "api_key_env"),
        ({"site": "nowhere"}, (InvalidSetting, UnknownName), "nowhere"),
        ({"min_kept": 13}, InvalidSetting, "min_kept=13, but formal is asked for 12 answers of a kind: 3 questions, 2"),
        (
            {"traits": (msgspec.structs.replace(shipped_traits()["evil"], questions=("Why?",)),)},
            InvalidSetting,
            "evil has 1 q",
        ),
        ({"layers": slice(1, 3)}, InvalidSetting, r"layers=slice\(1, 3, None\); give 'all'"),
        ({"layers": [True]}, InvalidSetting, r"layers=\[True\]"),
        ({"layers": "none"}, InvalidSetting, "layers='none'"),
        ({"layers": ()}, InvalidSetting, r"layers=\(\)"),
        ({"layers": [1.5]}, InvalidSetting, r"layers=\[1.5\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, error, says) -> None:
    """Before anything runs, and by name."""
    with pytest.raises(error, match=says):
        made(**changes)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (range(1, 6, 2), (1, 3, 5)),
        ([4, -1], (4, -1)),
        (np.array([2, 3]), (2, 3)),
        ([np.int64(7)], (7,)),
        (np.int32(7), 7),
        (3, 3),
        ("all", "all"),
    ],
)
def test_layers_are_kept_in_one_shape(given, kept) -> None:
    """However they are written, they are an int, a tuple of int, or "all", and can be written down as JSON."""
    found = made(layers=given).layers
    assert found == kept
    assert {type(layer) for layer in found} == {int} if isinstance(found, tuple) else type(found) is type(kept)
    assert stage_hashes(described(made(layers=given)), MODEL) == stage_hashes(described(made(layers=kept)), MODEL)


async def test_rows_that_cannot_be_read_are_refused_before_anything_runs(tmp_path) -> None:
    """A layer or site without a tap is PointNotArmed, and no folder is made."""
    model = armed(Point(1, "resid_post"), Point(2, "resid_post"))
    for changes, error in (
        ({"layers": (1, 3)}, PointNotArmed),
        ({"layers": 1, "site": "mlp_out"}, PointNotArmed),
        ({"layers": 9}, LayerOutOfRange),
    ):
        with pytest.raises(error):
            await run_persona(model, made(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_all_layers_may_be_read_of_a_site_that_some_layers_lack() -> None:
    """A mixture of experts with a dense layer has a router at the others alone: they are all its layers."""
    model = armed(*(Point(layer, "router") for layer in (0, 2, 3)), exists=lambda point: point.layer != 1)
    check(model, made(site="router", layers="all"))
    with pytest.raises(PointNotArmed, match="this model has no 'router' at layer 1"):
        check(model, made(site="router", layers=1))


def armed(*points: Point, exists: Callable[[Point], bool] = lambda _: True) -> Any:
    """A model of 4 layers, as far as it says where rows can be read."""
    indices = {point: index for index, point in enumerate(points)}
    settings = Settings(edits_per_point=1)
    compiler = Compiler(
        indices, {}, [], num_layers=4, settings=settings, exists=exists, refused={}, vocabulary=10, names=()
    )
    return types.SimpleNamespace(check_capture=lambda spec: compiler.captured(spec)[0])


def test_every_request_has_its_own_seed_and_name() -> None:
    """Seeds depend on the run's seed and the request alone: fewer questions leave those of the others."""
    every, fewer, other = (list(all_requests(made(**changes))) for changes in ({}, {"n_questions": 2}, {"seed": 1}))
    assert len(every) == 2 * 2 * 2 * 3 * 2
    assert len({request.id for request in every}) == len({request.seed for request in every}) == len(every)
    assert {(request.id, request.seed) for request in fewer} < {(request.id, request.seed) for request in every}
    assert not {request.seed for request in every} & {request.seed for request in other}
    assert {request.counterpart for request in every} == {request.id for request in every}


MODEL = {"name": "m", "revision": "", "dtype": "float32"}
AFTER = {
    "generate": {"generate", "score", "filter", "capture", "vectors"},
    "score": {"score", "filter", "vectors"},
    "filter": {"filter", "vectors"},
    "capture": {"capture", "vectors"},
    "vectors": {"vectors"},
    "": set(),
}


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"seed": 1}, "generate"),
        ({"max_tokens": 9}, "generate"),
        ({"traits": ("poetic", "formal")}, "generate"),
        ({"scorer": "keywords"}, "score"),
        ({"scorer_args": {"sentences": False}}, "score"),
        ({"threshold_high": 60.0}, "filter"),
        ({"layers": (1, 2)}, "capture"),
        ({"read_system": False}, "capture"),
        ({"method": "probe"}, "vectors"),
        ({"concurrency": 7}, ""),
    ],
)
def test_a_setting_changes_the_stages_that_depend_on_it(changes, stage) -> None:
    """And no stage before them."""
    before = stage_hashes(described(made()), MODEL)
    after = stage_hashes(described(made(**changes)), MODEL)
    assert {name for name in before if before[name] != after[name]} == AFTER[stage]


def test_how_hard_a_judge_tries_does_no_stage_again(tmp_path) -> None:
    """A folder keeps the arguments that its marks are of, unless scores would differ; the call has its own."""

    def opened(**more: Any) -> StageFolder:
        arguments = {"base_url": "http://h/v1", "model": "j", "concurrency": 16, **more}
        return open_folder(tmp_path, MODEL, made(scorer="judge", scorer_args=arguments))

    opened().finish("score")
    assert opened(concurrency=2, retries=9).is_done("score")
    assert opened(logprobs=True).is_done("score")  # as by default
    assert RUN.read(tmp_path).settings["scorer_args"]["concurrency"] == 16
    assert opened().is_done("score")
    assert not opened(model="k").is_done("score")


def test_every_setting_belongs_to_a_stage() -> None:
    """None but the number in flight may change without a stage being done again."""
    known = {name.split(".")[0] for stage in STAGES for name in DEPENDS[stage]}
    assert known == set(PersonaSettings.__struct_encode_fields__) - {"max_in_flight"}
    parts = {name.split(".")[1] for stage in STAGES for name in DEPENDS[stage] if "." in name}
    assert parts == set(type(shipped_traits()["formal"]).__struct_fields__)


# Run folders


def test_a_folder_of_another_run_is_refused(tmp_path) -> None:
    """With the differences named; a change of later stages is none."""
    open_folder(tmp_path, MODEL, made())
    open_folder(tmp_path, MODEL, made(method="probe", scorer="keywords"))
    with pytest.raises(RunDiffers, match=r"seed was 0, is 1"):
        open_folder(tmp_path, MODEL, made(seed=1, method="pca"))
    with pytest.raises(RunDiffers, match=r"\bsamples was 2, is 3"):
        open_folder(tmp_path, MODEL, made(samples=3))
    with pytest.raises(RunDiffers, match=r"model\.name was 'm', is 'other'"):
        open_folder(tmp_path, MODEL | {"name": "other"}, made())
    changed = msgspec.structs.replace(shipped_traits()["formal"], questions=("What?", "Why?"))
    with pytest.raises(RunDiffers, match=r"traits\.formal\.questions was \['How do I cook rice"):
        open_folder(tmp_path, MODEL, made(traits=(changed, "poetic")))


def test_a_folder_that_is_no_run_is_refused(tmp_path) -> None:
    """Broken or newer settings are InvalidFile."""
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"settings\.json"):
        open_folder(tmp_path, MODEL, made())
    state = {"version": 1, "model": MODEL, "settings": json.loads(msgspec.json.encode(described(made())))}
    del state["settings"]["top_p"]
    (tmp_path / "settings.json").write_text(json.dumps(state))
    with pytest.raises(InvalidFile, match=r"settings\.json lacks .*'top_p'.*choose another folder"):
        open_folder(tmp_path, MODEL, made())
    state = {"version": 2, "model": MODEL, "settings": json.loads(msgspec.json.encode(described(made())))}
    (tmp_path / "settings.json").write_text(json.dumps(state))
    with pytest.raises(InvalidFile, match="version 2"):
        open_folder(tmp_path, MODEL, made())


def test_results_are_used_only_while_what_they_depend_on_holds(tmp_path) -> None:
    """Changed and changed back, a stage whose results were begun again is not taken for done."""
    first = open_folder(tmp_path, MODEL, made())
    for stage in STAGES:
        first.begin(stage)
        first.finish(stage)
    assert all(open_folder(tmp_path, MODEL, made()).is_done(stage) for stage in STAGES)
    other = open_folder(tmp_path, MODEL, made(threshold_high=70.0))
    assert [stage for stage in STAGES if other.is_done(stage)] == ["generate", "score", "capture"]
    other.begin("vectors")
    again = open_folder(tmp_path, MODEL, made())
    assert [stage for stage in STAGES if again.is_done(stage)] == ["generate", "score", "filter", "capture"]
    assert not open_folder(tmp_path, MODEL, made(threshold_high=70.0)).is_done("vectors")


def test_what_a_killed_process_left_half_written_goes(tmp_path) -> None:
    """Scratch files of atomic writes are removed, all else stays."""
    scratch = tmp_path / "parts" / f".x.parquet.{'0' * 32}"
    kept = tmp_path / ".hidden"
    scratch.parent.mkdir()
    scratch.touch()
    os.utime(scratch, (0, 0))
    kept.touch()
    open_folder(tmp_path, MODEL, made())
    assert not scratch.exists()
    assert kept.exists()


async def test_what_waits_is_written_though_nothing_comes(tmp_path) -> None:
    """Answers end in bursts: those after the first of a burst must not wait for the next one to be safe."""
    parts = TableWriter(tmp_path, Score, records=100, seconds=0.01)
    for place in range(5):
        parts.add(Score(str(place), None))
    async with asyncio.timeout(10):
        while len(parts.read()) < 5:
            await asyncio.sleep(0)


def test_records_are_written_in_parts_as_they_come(tmp_path) -> None:
    """After so many records, or so many seconds, and on leaving, whatever ends it."""
    now = [0.0]

    def write() -> None:
        with TableWriter(tmp_path, Score, records=3, seconds=5.0, clock=lambda: now[0]) as parts:
            for place in range(4):
                parts.add(Score(str(place), None))
            assert len(parts.read()) == 3
            now[0] = 6.0
            parts.add(Score("4", 1.0))
            assert len(parts.read()) == 5
            parts.add(Score("5", 2.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert sorted(score.id for score in TableWriter(tmp_path, Score).read()) == [str(place) for place in range(6)]
    assert len(list(tmp_path.iterdir())) == 3


# Stages that need no engine


@pytest.mark.parametrize(
    ("ids", "finish", "stop_reason", "left"),
    [
        ((5, 6, 7), "stop", None, (5, 6)),  # 7 ends a turn, and is an ordinary token to the tokenizer
        ((5, 6, 7), "length", None, (5, 6, 7)),
        ((5, 7, 6), "stop", None, (5, 7, 6)),
        ((5, 7, 7), "stop", None, (5, 7)),  # the first of them did not end it
        ((5, 6, 9), "stop", 9, (5, 6)),
        ((5, 6, 9), "stop", "word", (5, 6, 9)),
        ((5, 6, 0, 1), "length", None, (5, 6)),
        ((5, 0, 7), "stop", None, (5,)),
        ((7,), "stop", None, ()),
        ((), "stop", None, ()),
    ],
)
def test_what_ended_an_answer_is_no_part_of_it(ids, finish, stop_reason, left) -> None:
    """An EOS of the generation configuration or vLLM's stop token where it ended the answer, special tokens always."""
    assert answer_ids(ids, ends_of({"eos_token_id": [7, 8]}, [0, 1]), finish, stop_reason) == left


def test_the_tokens_that_end_a_turn_are_one_several_or_none() -> None:
    """As generation configurations write them."""
    assert ends_of({"eos_token_id": 7}, []).turn == ends_of({"eos_token_id": [7]}, []).turn == {7}
    assert ends_of({}, []).turn == set()


def answered(settings: PersonaSettings, answer=lambda _: "It is so.") -> list[Response]:
    """Responses to every request."""
    return [
        Response(**msgspec.structs.asdict(request), answer=answer(request), token_ids=(1, 2), finish="stop")
        for request in all_requests(settings)
    ]


def test_answers_are_kept_by_their_score() -> None:
    """Positive ones from the high threshold up, negative ones up to the low one, none without a score."""
    settings = made(threshold_high=60.0, threshold_low=40.0)
    responses = answered(settings)
    values = {"positive": (60.0, 59.9, 100.0, None), "negative": (40.0, 40.1, 0.0, None)}
    scores = [Score(one.id, values[one.sign][2 * one.prompt + one.sample]) for one in responses]
    kept = {one.id: one for one in keep(settings, responses, scores)[0]}
    assert set(kept) == {one.id for one in responses if (one.prompt, one.sample) in {(0, 0), (1, 0)}}
    assert all(kept[one.id].score == one.score for one in scores if one.id in kept)


def test_pairs_are_kept_or_dropped_together() -> None:
    """With `paired`, an answer whose counterpart is dropped goes too."""
    settings = made(paired=True)
    responses = answered(settings)
    bad = "formal/negative/1/2/0"
    scores = [Score(one.id, 90.0 if one.sign == "positive" or one.id == bad else 10.0) for one in responses]
    kept = {one.id for one in keep(settings, responses, scores)[0]}
    assert {one.id for one in responses} - kept == {bad, "formal/positive/1/2/0"}
    assert bad not in {one.id for one in keep(made(), responses, scores)[0]}
    assert "formal/positive/1/2/0" in {one.id for one in keep(made(), responses, scores)[0]}


def test_a_weak_trait_is_left_out_with_the_counts() -> None:
    """It says how many of each kind there are, were needed, and had no score; an error only if no trait is left."""
    settings = made(min_kept=5)
    responses = answered(settings)
    scores = [
        Score(one.id, None if one.id.startswith("poetic/negative/0") else 90.0 if one.sign == "positive" else 10.0)
        for one in responses
    ]
    assert keep(settings, responses, scores)[1] == {}
    kept, left_out = keep(made(min_kept=7), responses, scores)
    assert {one.trait for one in kept} == {"formal"}
    assert list(left_out) == ["poetic"]
    assert "kept 12 of 12 positive, 6 of 12 negative answers, 6 had no score; 7" in left_out["poetic"]
    alone, mine = made(min_kept=7, traits=("poetic",)), [one for one in responses if one.trait == "poetic"]
    with pytest.raises(TooFewKept, match=r"poetic: kept 12 of 12 positive, 6 of 12 negative"):
        keep(alone, mine, [one for one in scores if one.trait == "poetic"])
    lonely = [
        Score(one.id, 90.0 if one.sign == "positive" else (10.0 if one.question == 0 else 90.0)) for one in responses
    ]
    with pytest.raises(TooFewKept, match="only 1 questions have both kinds"):
        keep(made(), responses, lonely)


async def test_answers_that_were_written_are_not_asked_for_again(tmp_path) -> None:
    """After an error what came lies in parts; the next run asks for the others, and finishes each group once."""
    settings, asked, finished = made(traits=("formal", "poetic"), concurrency=3), [], []
    wanted = list(all_requests(settings))

    async def run(_messages: Any, params: Any, *, steering: Any) -> Any:
        """Answer with the seed, as often as is left."""
        await asyncio.sleep(0)
        if not left:
            raise InvalidRequest("no more")
        assert steering is None, "nothing of what encloses the run steers it"
        asked.append(params["seed"])
        left.pop()
        sample = types.SimpleNamespace(
            text=f"{params['seed']}", token_ids=[1, 7], finish_reason="stop", stop_reason=None
        )
        return types.SimpleNamespace(samples=[sample])

    def groups() -> Iterator[AnswerGroup[Response]]:
        for name in ("formal", "poetic"):
            mine = [request for request in wanted if request.trait == name]
            yield AnswerGroup(mine, TableWriter(tmp_path / name, Response), finished.append)

    def counted() -> Count:
        return Count("generate", len(wanted), 0, reports.append)

    reports: list[Progress] = []
    left = [None] * 30
    tokenizer = types.SimpleNamespace(all_special_ids=[7])
    model = types.SimpleNamespace(run=run, generation_config={"eos_token_id": 7}, tokenizer=tokenizer)
    with pytest.raises(InvalidRequest, match="no more"):
        await answer_groups(model, settings, groups(), Response, counted())
    assert [[one.id for one in group] for group in finished] == [[one.id for one in wanted[:24]]]
    left += [None] * 99
    finished.clear()
    await answer_groups(model, settings, groups(), Response, counted())
    assert sorted(asked) == sorted(request.seed for request in wanted)
    assert [one for group in finished for one in group] == [
        Response(**msgspec.structs.asdict(one), answer=f"{one.seed}", token_ids=(1,), finish="stop") for one in wanted
    ]
    assert reports[-1] == Progress("generate", 48, 48)


async def test_traits_come_and_go_without_the_others_being_asked_again(tmp_path) -> None:
    """Answers and scores of a trait do not depend on the others; those of a trait that is left away stay for later."""

    async def through(*names: str, fresh: tuple[str, ...] = (), **changes) -> list[list[int]]:
        """Run two stages without a model, answers of fresh traits lying in parts; how many were there at first."""
        settings = made(traits=names, scorer="keywords", **changes)
        folder = open_folder(tmp_path, MODEL, settings)
        for name in fresh:
            with TableWriter(folder.parts("generate", name), Response) as parts:
                for one in answered(settings, lambda request: f"answer {request.id}"):
                    if one.trait == name:
                        parts.add(one)
        reports: list[Progress] = []
        responses = await generate(None, settings, folder, None)
        assert [one.id for one in responses] == [request.id for request in all_requests(settings)]
        assert all(one.answer == f"answer {one.id}" for one in responses)
        scores = await score(settings, folder, responses, reports.append)
        assert [one.id for one in scores] == [one.id for one in responses]
        return [reports[0].done, reports[-1].done]

    assert await through("formal", "poetic", fresh=("formal", "poetic")) == [0, 48]
    assert await through("poetic", "formal") == [48, 48]
    assert await through("evil", "poetic", fresh=("evil",)) == [24, 48]
    assert await through("formal") == [24, 24]
    assert await through("evil", "formal", "poetic") == [72, 72]
    assert len(read_table(tmp_path / "responses.parquet", Response)) == 72
    changed = msgspec.structs.replace(shipped_traits()["evil"], keywords=("answer",))
    assert await through(changed, "formal") == [24, 48]
    with pytest.raises(RunDiffers, match=r"traits\.poetic\.positive"):
        await through(msgspec.structs.replace(shipped_traits()["poetic"], positive=("Rhyme.", "Sing.")), "formal")
    with pytest.raises(RunDiffers, match=r"seed was 0, is 1"):
        await through("humorous", seed=1)


async def test_rows_of_a_trait_stay_when_others_come_and_go(tmp_path) -> None:
    """And rows of other settings go, before those of the new ones are taken for whole."""

    async def through(*names: str, fresh: tuple[str, ...] = (), value: float = 0.0, **changes) -> dict[str, float]:
        settings = made(traits=names, **changes)
        folder, responses = open_folder(tmp_path, MODEL, settings), answered(settings)
        for name in fresh:
            ids = tuple(one.id for one in responses if one.trait == name)
            header = AnswerRowsHeader(VERSION, (1,), ids, ("00",) * len(ids))
            write_tensors(
                folder.parts("capture", name) / "a.safetensors", header, {"rows": torch.full((len(ids), 1, 2), value)}
            )
        scores = [Score(one.id, 90.0 if one.sign == "positive" else 10.0) for one in responses]
        kept = [one for one in keep(settings, responses, scores)[0] if one.trait in fresh or not changes]
        await capture(None, settings, folder, Records(responses, scores, kept), room={}, report=None)
        paths = {name: rows_file(folder, name) for name in ("formal", "poetic", "evil")}
        return {name: float(load_rows(path)[1].mean()) for name, path in paths.items() if path.exists()}

    assert await through("formal", "poetic", fresh=("formal", "poetic"), value=1.0) == {"formal": 1, "poetic": 1}
    assert await through("evil", "formal", fresh=("evil",), value=2.0) == {"formal": 1, "poetic": 1, "evil": 2}
    assert await through("poetic") == {"formal": 1, "poetic": 1, "evil": 2}
    assert await through("formal", "evil", fresh=("evil",), value=3.0, read_system=False) == {"poetic": 1, "evil": 3}


def finished(path: Any, settings: PersonaSettings, *, kept: Callable[[Score], bool], layers=(0, 1)) -> dict[str, Any]:
    """Write the folder of a run whose stages are done, and return the answers' scores and rows by id."""
    folder, responses, rng = open_folder(path, MODEL, settings), answered(settings), np.random.default_rng(0)
    scores = [Score(one.id, float(rng.integers(0, 101))) for one in responses]
    scores[3] = Score(scores[3].id, None)
    rows = {one.id: torch.from_numpy(rng.normal(size=(len(layers), 4))).float() for one in responses}
    write_table(path / "responses.parquet", responses)
    write_table(path / "scores.parquet", scores)
    for trait in settings.resolved():
        ids = [one.id for one in scores if one.trait == trait.name and one.score is not None and kept(one)]
        header = AnswerRowsHeader(VERSION, layers, tuple(ids), ("00",) * len(ids))
        if ids:
            write_tensors(rows_file(folder, trait.name), header, {"rows": torch.stack([rows[one] for one in ids])})
    for stage in ("generate", "score", "capture"):
        folder.begin(stage)
        folder.finish(stage)
    return {one.id: (one.score, rows[one.id]) for one in scores}


def test_equal_numbers_are_the_same_settings(tmp_path) -> None:
    """Whole or not: nothing that is done is done again."""

    def opened(number: float) -> StageFolder:
        settings = made(temperature=number, top_p=number, threshold_high=number, threshold_low=number)
        return open_folder(tmp_path / str(first), MODEL, settings)

    for first, other in ((1, 1.0), (1.0, 1)):
        for stage in STAGES:
            opened(first).begin(stage)
            opened(first).finish(stage)
            assert opened(other).is_done(stage)
        assert opened(first).is_done("vectors")


def test_answers_that_would_be_equal_are_not_begun(tmp_path) -> None:
    """A new folder has none that count as several; one of before is resumed."""
    settings = PersonaSettings(traits=("formal",), temperature=0)
    for begin in (lambda: check_same(tmp_path / "a", settings), lambda: open_folder(tmp_path / "a", MODEL, settings)):
        with pytest.raises(InvalidSetting, match="samples=10 at temperature 0 would all be the same text"):
            begin()
    assert not (tmp_path / "a").exists()
    open_folder(tmp_path / "a", MODEL, PersonaSettings(traits=("formal",), temperature=0, samples=1))
    RUN.write(tmp_path, RUN.type(1, MODEL, described(settings)))
    check_same(tmp_path, settings)
    open_folder(tmp_path, MODEL, settings)


def test_directions_of_other_answers_are_made_anew(tmp_path) -> None:
    """As of a trait that a longer context has room for: with the same settings, it gets its directions then."""
    settings = made(threshold_high=0.0, threshold_low=100.0)
    finished(tmp_path, settings, kept=lambda _: True)
    folder, responses = open_folder(tmp_path, MODEL, settings), answered(settings)
    scores, model = read_table(tmp_path / "scores.parquet", Score), types.SimpleNamespace(model="m", origin={})

    def found(*left_out: str) -> set[str]:
        room = {one.id: int(one.trait not in left_out) for one in responses}
        records = Records(responses, scores, keep(settings, responses, scores, room)[0])
        assert set(vectors(model, settings, folder, records, None)) == {one.trait for one in records.kept}
        return set(DirectionSet.load(tmp_path / "directions.safetensors"))

    assert found("poetic") == {"formal"}
    written = (tmp_path / "directions.safetensors").stat().st_mtime_ns
    assert found("poetic") == {"formal"}
    assert (tmp_path / "directions.safetensors").stat().st_mtime_ns == written
    assert found() == {"formal", "poetic"}


def pairs_in(found: dict[str, Any], trait: str, apart: float) -> list[torch.Tensor]:
    """Differences of answers to one prompt, question and sample, that are scored more than `apart` apart."""
    first = {
        name.replace("/positive/", "/"): one for name, one in found.items() if name.startswith(f"{trait}/positive")
    }
    second = {name.replace("/negative/", "/"): one for name, one in found.items() if name.startswith(f"{trait}/neg")}
    both = [(first[name], second[name]) for name in first]
    return [
        a[1] - b[1] for a, b in both if a[0] is not None and b[0] is not None and (apart < 0 or a[0] - b[0] > apart)
    ]


def test_levels_of_a_run_whose_answers_are_all_kept(tmp_path) -> None:
    """Files hold the means over pairs of one sample, and of positive answers by score; what is left out is counted."""
    settings = made(threshold_high=0.0, threshold_low=100.0)
    found = finished(tmp_path / "run", settings, kept=lambda _: True)
    written = write_levels(tmp_path / "run", tmp_path / "vectors")
    assert set(written.files) == {"formal", "poetic"}
    for trait in ("formal", "poetic"):
        plain = torch.load(tmp_path / "vectors" / f"{trait}.pt", weights_only=True)
        assert "pos_default" not in plain
        for level, apart in (("pos_neg", -1), ("pos_neg_50", 50)):
            wanted = pairs_in(found, trait, apart)
            assert wanted, "the draw has pairs"
            torch.testing.assert_close(plain[level], torch.stack(wanted).mean(0))
            assert written.used[trait][level] == 2 * len(wanted)
        for level, low, high in (("pos_70", 70, 101), ("pos_40_70", 40, 70)):
            scored = [
                rows
                for name, (score, rows) in found.items()
                if name.startswith(f"{trait}/positive") and score is not None and low <= score < high
            ]
            torch.testing.assert_close(plain[level], torch.stack(scored).mean(0))
    assert written.left_out["formal"]["pos_neg"] == {"not scored": 1}
    assert written.left_out["formal"]["pos_default"] == {"no partner": 12}


def test_levels_that_need_answers_not_kept_are_absent(tmp_path) -> None:
    """With thresholds of 50, pos_neg_50 and pos_70 are whole; pos_neg and pos_40_70 would be of kept answers alone."""
    settings = made(samples=6)
    kept = lambda one: one.score >= 50 if "/positive/" in one.id else one.score <= 50  # noqa: E731
    found = finished(tmp_path / "run", settings, kept=kept)
    written = write_levels(tmp_path / "run", tmp_path / "vectors")
    plain = torch.load(written.files["poetic"], weights_only=True)
    assert set(plain) == {"pos_neg_50", "pos_70"}
    torch.testing.assert_close(plain["pos_neg_50"], torch.stack(pairs_in(found, "poetic", 50)).mean(0))
    assert written.left_out["poetic"]["pos_neg"]["absent, as answers were not kept"] > 0
    assert written.left_out["poetic"]["pos_40_70"]["absent, as answers were not kept"] > 0


def test_levels_are_written_by_command(tmp_path) -> None:
    """The command writes the same files, and says what is there, and what is not and why."""
    finished(tmp_path / "run", made(), kept=lambda _: True)
    told = call("persona", "levels", str(tmp_path / "run"), "--out", str(tmp_path / "vectors"))
    assert told.exit_code == 0, told.output
    assert {path.name for path in (tmp_path / "vectors").iterdir()} == {"formal.pt", "poetic.pt"}
    assert "no partner" in told.stdout
    (tmp_path / "vectors" / "poetic.pt").write_bytes(b"of another run")
    again = ("persona", "levels", str(tmp_path / "run"), "--out", str(tmp_path / "vectors"))
    assert call(*again).exit_code == 2
    assert (tmp_path / "vectors" / "poetic.pt").read_bytes() == b"of another run"
    assert call(*again, "--force").exit_code == 0
    assert "pos_neg" in torch.load(tmp_path / "vectors" / "poetic.pt", weights_only=True)
    shown = call("persona", "levels", str(tmp_path / "run"), "--out", str(tmp_path / "v"), "--minimum", "99", "--json")
    document = json.loads(shown.stdout)
    assert document["files"] == {}
    assert document["left_out"]["formal"]["pos_70"]["fewer than 99"] > 0
    assert call("persona", "levels", str(tmp_path), "--out", str(tmp_path / "v")).exit_code != 0


def test_levels_of_other_runs_are_refused_or_left_out(tmp_path) -> None:
    """A run of some layers, of another site, unfinished, without kept answers, or with traits of earlier settings."""
    finished(tmp_path / "some", made(), kept=lambda _: True, layers=(1, 2))
    with pytest.raises(InvalidSpec, match=r"rows of layers \[1, 2\]"):
        write_levels(tmp_path / "some", tmp_path / "vectors")
    finished(tmp_path / "site", made(site="mlp_out"), kept=lambda _: True)
    with pytest.raises(InvalidSpec, match="rows of mlp_out"):
        write_levels(tmp_path / "site", tmp_path / "vectors")
    open_folder(tmp_path / "begun", MODEL, made())
    with pytest.raises(RunUnfinished, match="none of formal, poetic is done"):
        write_levels(tmp_path / "begun", tmp_path / "vectors")
    with pytest.raises(InvalidFile):
        write_levels(tmp_path / "nothing", tmp_path / "vectors")
    finished(tmp_path / "none", made(), kept=lambda one: one.trait == "formal")
    for folder in ("vectors", "v"):
        (tmp_path / folder).mkdir()
        for name in ("poetic", "other"):
            (tmp_path / folder / f"{name}.pt").touch()
    written = write_levels(tmp_path / "none", tmp_path / "vectors")
    assert set(written.files) == {"formal"}
    assert {file.stem for file in (tmp_path / "vectors").iterdir()} == {"formal", "other"}  # poetic.pt was of another
    assert written.left_out["poetic"]["pos_70"]["absent, as answers were not kept"] > 0
    again = open_folder(tmp_path / "none", MODEL, made(traits=("formal",), read_system=False))
    again.begin("capture")
    again.finish("capture")
    assert write_levels(tmp_path / "none", tmp_path / "v").left_out["poetic"] == {
        "all": {"not done with these settings": 1}
    }
    assert {file.stem for file in (tmp_path / "v").iterdir()} == {"formal", "other"}


def test_an_answer_that_fills_the_context_is_read_as_far_as_there_is_room() -> None:
    """One token is left for the model to generate; an answer with no room is not kept, and the reason says so."""
    from transformers import AutoTokenizer

    settings = made(traits=("formal",))
    tokenizer, responses = AutoTokenizer.from_pretrained(smollm2()), answered(settings)
    first = responses[0]
    messages = [
        {"role": "system", "content": first.system_prompt},
        {"role": "user", "content": first.question_text},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    length = len(tokenizer.encode(text, add_special_tokens=False))
    for left, room in ((-1, 0), (0, 0), (1, 0), (2, 1), (3, 2), (99, 2)):  # the answers have two tokens
        assert room_of(tokenizer, length + left, settings, [first]) == {first.id: room}
    alone = made(traits=("formal",), read_system=False)
    assert room_of(tokenizer, length, alone, [first]) == {first.id: 2}
    scores = [Score(one.id, 90.0 if one.sign == "positive" else 10.0) for one in responses]
    rooms = {one.id: 0 if one.id == first.id else 1 for one in responses}
    assert {one.id for one in responses} - {one.id for one in keep(settings, responses, scores, rooms)[0]} == {first.id}
    with pytest.raises(TooFewKept, match=r"formal: kept 0 of 12 positive.*24 whose prompt leaves .*max_model_len"):
        keep(settings, responses, scores, dict.fromkeys(rooms, 0))


@pytest.mark.slow
async def test_scoring_goes_on_where_it_was_cut_off(tmp_path) -> None:
    """Scores that lie in parts are not made again, and all are what one uninterrupted pass gives, bit for bit."""
    settings = made(n_prompts=5, n_questions=5)
    responses = answered(
        settings, lambda request: f"{request.question_text} {request.system_prompt}" if request.question else " "
    )
    whole = await score(settings, open_folder(tmp_path / "a", MODEL, settings), responses, None)
    assert {one.score is None for one, response in zip(whole, responses, strict=True) if not response.question} == {
        True
    }

    class Cut(Exception):
        pass

    def cut(report: Progress) -> None:
        if report.done >= 64:
            raise Cut

    with pytest.raises(Cut):
        await score(settings, open_folder(tmp_path / "b", MODEL, settings), responses, cut)
    reports: list[Progress] = []
    again = await score(settings, open_folder(tmp_path / "b", MODEL, settings), responses, reports.append)
    assert reports[0].done == 64
    assert reports[-1] == Progress("score", len(responses), len(responses))
    assert again == whole == read_table(tmp_path / "b" / "scores.parquet", Score)
    assert not list((tmp_path / "b" / "parts").iterdir())


# The report


def test_a_report_is_drawn_from_records(tmp_path) -> None:
    """Table, pictures and answers; what an answer holds is not taken for Markdown."""
    settings = made()
    responses = answered(settings, lambda _: "<b>*bold*</b> | [x](y)\n# head")
    scores = [Score(one.id, 90.0 if one.sign == "positive" else 10.0) for one in responses]
    records = Records(responses, scores, keep(settings, responses, scores)[0])
    torch.manual_seed(0)
    rows = {sign: torch.randn(12, 3, 8) + (1.0 if sign == "positive" else 0.0) for sign in SIGNS}
    groups = [one.question for one in records.kept_of("formal", "positive")]
    found = [
        directions_of(name, Contrast(rows["positive"], rows["negative"], groups, groups), (3, 5, 7))
        for name in ("formal", "poetic")
    ]
    directions = found[0] | found[1]
    told = outcomes(directions, records)
    text = write_report(tmp_path, settings, directions, told, records).read_text()
    assert told["formal"].mean_scores == (90.0, 10.0)
    assert told["formal"].kept == told["formal"].responses == (12, 12)
    assert told["formal"].best_layer in (3, 5, 7)
    best = told["poetic"].best_layer
    assert (
        told["poetic"].auc
        == directions.provenance.auc["poetic"][best]
        == max(directions.provenance.auc["poetic"].values())
    )
    assert f"| poetic | 12 / 12 | 0 / 0 | 12 / 12 | 90 / 10 | {best} |" in text
    assert "<b>" not in text
    assert r"\<b\>\*bold\*\</b\> \| \[x\](y) \# head" in text
    for name in ("auc", "scores", "cosines"):
        assert f"]({name}.png)" in text
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_trait_that_is_left_out_is_told_with_its_reason(tmp_path) -> None:
    """In the report, the command's table and its JSON, beside the vectors of the others."""
    settings = made()
    responses = answered(settings)
    scores = [
        Score(one.id, None if one.trait == "poetic" else 90.0 if one.sign == "positive" else 10.0) for one in responses
    ]
    kept, left_out = keep(settings, responses, scores)
    records = Records(responses, scores, kept)
    groups = [one.question for one in records.kept_of("formal", "positive")]
    torch.manual_seed(0)
    contrast = Contrast(torch.randn(12, 3, 8) + 1, torch.randn(12, 3, 8), groups, groups)
    directions = directions_of("formal", contrast, (3, 5, 7))
    told = outcomes(directions, records, left_out)
    assert list(told) == ["formal", "poetic"]
    assert told["formal"].left_out == ""
    assert (told["poetic"].responses, told["poetic"].unscored, told["poetic"].kept) == ((12, 12), (12, 12), (0, 0))
    assert (told["poetic"].best_layer, told["poetic"].auc) == (None, None)
    report = write_report(tmp_path, settings, directions, told, records)
    assert "| poetic | 12 / 12 | 12 / 12 | 0 / 0 | none / none | left out |" in report.read_text()
    assert "**poetic** was left out: kept 0 of 12 positive" in report.read_text()
    result = PersonaResult(directions, told, tmp_path, report)
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(result), *left_out_of(result))
    shown = console.file.getvalue()
    assert "left out" in shown
    assert "24 had no score; 2 of each are needed" in " ".join(shown.split())
    assert "24 had no score" in json.loads(msgspec.json.encode(told))["poetic"]["left_out"]
    assert not left_out_of(PersonaResult(directions, {"formal": told["formal"]}, tmp_path, report))


def test_the_band_of_chance_is_that_of_random_scores() -> None:
    """Of many random scorings, 95 of 100 have an AUC inside it."""
    from sklearn.metrics import roc_auc_score

    draw = np.random.default_rng(0)
    kinds = [1] * 12 + [0] * 20
    found = np.array([roc_auc_score(kinds, draw.normal(size=32)) for _ in range(1000)])
    low, high = chance_band(12, 20)
    inside = np.mean((low <= found) & (found <= high))
    assert 0.92 < inside < 0.98  # four standard errors of a share of 1000
