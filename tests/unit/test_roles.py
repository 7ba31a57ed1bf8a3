"""Roles without an engine: reading them, sharing them out, the axis, its stability, floors, and what changes."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import roles_batch
import torch
import typer
from cli_calls import call
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from support.examples import cross_validated

from steercap import Cap, SteeringSpec
from steercap.core.protocols import Count
from steercap.core.spec import Point
from steercap.core.tokens import selected
from steercap.errors import (
    InvalidFile,
    InvalidPrompt,
    InvalidSetting,
    InvalidSpec,
    LayerOutOfRange,
    RunDiffers,
    RunUnfinished,
    UnknownName,
    WorkerFailure,
)
from steercap.files.native import read_header
from steercap.lab.directions import Exchange
from steercap.lab.personas.records import RoleResponse
from steercap.lab.personas.roles import (
    ASSISTANT,
    AssistantAxis,
    CapRecord,
    Case,
    Role,
    RoleRows,
    RoleSet,
    RoleSettings,
    assistant_axis,
    capping,
    cases_of,
    changes,
    drift_cases,
    drift_prompts,
    load_roles,
    load_roles_run,
    plot_changes,
    plot_positions,
    plot_roles,
    plot_stability,
    shipped_roles,
    stability,
    token_projections,
)
from steercap.lab.personas.roles import (
    split_half as halves,
)
from steercap.lab.personas.roles.axis import axes, directions
from steercap.lab.personas.roles.folder import RUN, RolesDefinition, check_same, open_folder
from steercap.lab.personas.roles.pipeline import _finish, _is_read
from steercap.lab.personas.roles.role import trait_of
from steercap.lab.personas.roles.rows import load_part
from steercap.lab.personas.roles.settings import RoleOutcome, described, digests_of, requests_of, share_of
from steercap.lab.personas.roles.stages import _write, kept_of
from steercap.steering import LayerVectors
from steercap.steering.formats import load_capping

QUESTIONS = ("Who are you?", "What is the sea?", "Why?")
PAIR = RoleSet((Role("pirate", ("Be a pirate.",)), Role("poet", ("Be a poet.", "Sing."))), QUESTIONS)


# What roles are


def test_what_is_shipped_can_be_told_apart() -> None:
    """24 roles of three prompts, 24 questions; of every fourth, sentences are told from plain ones by others' example."""
    roles = shipped_roles()
    assert (len(roles.roles), len(roles.questions), len(drift_prompts())) == (24, 24, 8)
    assert {len(role.prompts) for role in roles.roles} == {3}
    assert not [role.name for role in roles.roles if len(role.keywords) < 8 or not role.description]
    values = [cross_validated(trait_of(role, roles, "minilm")) for role in roles.roles[::4]]
    assert np.mean(values) > 0.9
    assert min(values) > 0.6


def test_drift_cases_have_seeds_of_their_own() -> None:
    """Each sample has one, the same in every call, and others under another seed."""
    drawn = [[case.seed for case in drift_cases(["who are you?"], samples=2, seed=seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 4
    twice = drift_cases(["who are you?", "why?", "who are you?"])  # drawn apart, and resampled together
    assert ([case.question for case in twice], len({case.seed for case in twice})) == ([0, 1, 0], 3)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Role("two words", ("Be.",)), "give one word"),
        (lambda: Role(ASSISTANT, ("Be.",)), "the name of the default assistant"),
        (lambda: Role("a", ()), "the prompts of a: 0 given"),
        (lambda: Role("a", ("Be.", " ")), "number 1, counted from 0, is empty"),
        (lambda: Role("a", ("Be.", "Be.")), "'Be.' is there twice"),
        (lambda: Role("a", ("Be.",), rubric="{question}"), "lacks {answer}"),
        (lambda: RoleSet((Role("a", ("Be.",)),), QUESTIONS), "1 roles; give two or more"),
        (lambda: RoleSet((Role("a", ("Be.",)), Role("a", ("Do.",))), QUESTIONS), "'a' is there twice"),
        (lambda: RoleSet(PAIR.roles, ("Who?",)), "questions: 1 given; give 2 or more"),
        (lambda: RoleSet(PAIR.roles, QUESTIONS, ()), "the assistant's prompts: 0 given"),
    ],
)
def test_what_is_no_role_is_refused(made, said) -> None:
    """The message says what is lacking."""
    with pytest.raises(ValueError, match=said.replace("{", r"\{").replace("}", r"\}")):
        made()


def test_a_scorer_must_have_what_it_needs() -> None:
    """Before anything is generated."""
    for scorer, said in (("minilm", "pirate has 0, and there are 0 plain ones"), ("keywords", "pirate has none")):
        with pytest.raises(InvalidSetting, match=said):
            RoleSettings(roles=PAIR, scorer=scorer, min_kept=1)
    rubric = trait_of(Role("odd", ("Be {odd}.",)), PAIR, "judge").rubric
    assert "The role: Be (odd)." in rubric
    assert "{question}" in rubric


# Files of roles

ROWS = [
    {"role": "assistant", "prompt": ""},
    {"role": "pirate", "prompt": 'Be a pirate, "now".', "description": "Robs.", "keywords": ["arr", "sea"], "id": 3},
    {"role": "poet", "prompt": "Be a poet."},
    {"role": "poet", "prompt": "Sing.\nLoud."},
]


def table(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        import csv

        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    return path


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_is_read_whatever_it_is(ending, tmp_path) -> None:
    """Roles in their order, prompts in theirs, other columns left alone; questions from a table too."""
    rows = [{"description": None, "keywords": None, "id": None} | row for row in ROWS] if ending == "parquet" else ROWS
    path = table(tmp_path / f"roles.{ending}", rows)
    questions = table(tmp_path / f"questions.{ending}", [{"question": text} for text in QUESTIONS])
    found = load_roles(path, questions=questions)
    assert found == RoleSet(
        (
            Role("pirate", ('Be a pirate, "now".',), "Robs.", ("arr", "sea")),
            Role("poet", ("Be a poet.", "Sing.\nLoud.")),
        ),
        QUESTIONS,
        ("",),
    )


def test_lists_of_prompts_and_questions_in_lines(tmp_path) -> None:
    """A row may hold all prompts of a role, a text file a question in each line."""
    (tmp_path / "q.txt").write_text("Who?\n\n  Why? \n")
    rows = [{"role": "a", "prompts": ["Be a.", "Do a."]}, {"role": "b", "prompts": ["Be b."]}]
    found = load_roles(table(tmp_path / "r.jsonl", rows), questions=tmp_path / "q.txt", assistant=["Help."])
    assert (found.prompts_of("a"), found.questions, found.assistant) == (
        ("Be a.", "Do a."),
        ("Who?", "Why?"),
        ("Help.",),
    )


def test_only_line_feeds_end_lines(tmp_path) -> None:
    """U+2028 and the like, which `str.splitlines` takes for ends of lines, are part of prompts and questions."""
    text = "Be\u2028a\u0085b\x0b\x1c."
    (tmp_path / "q.txt").write_text(f"{text}\r\nWhy?\n")
    rows = [{"role": "a", "prompt": text}, {"role": "b", "prompt": "Be b."}]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    found = load_roles(tmp_path / "r.jsonl", questions=tmp_path / "q.txt", assistant=["Help."])
    assert (found.prompts_of("a"), found.questions) == ((text,), (text, "Why?"))


def test_a_folder_holds_yaml_or_what_is_published(tmp_path) -> None:
    """Files by name, what they share beside them; `default.json` is the assistant."""
    (tmp_path / "_shared.yaml").write_text('questions: [Who?, Why?]\nplain: ["It is so."]\n')
    (tmp_path / "poet.yaml").write_text("name: poet\nprompts: [Be a poet.]\n")
    (tmp_path / "pirate.json").write_text(
        json.dumps({"instruction": [{"pos": "Arr."}], "eval_prompt": "Grade {question}"})
    )
    (tmp_path / "default.json").write_text(json.dumps({"instruction": [{"pos": ""}, {"pos": "Help."}]}))
    found = load_roles(tmp_path)
    assert found.names == ("pirate", "poet")
    assert (found.assistant, found.plain, found.prompts_of("pirate")) == (("", "Help."), ("It is so.",), ("Arr.",))


def spoilt(name: str, text: str | bytes):
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder / name

    return write


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (spoilt("a.txt", "x"), "neither a folder nor a table"),
        (spoilt("a.csv", "role,text\na,b\n"), "row 1: give a role, and its prompt as text .* it has role, text"),
        (spoilt("a.csv", "role,prompt\na,b,c\n"), "row 1: its number of cells differs"),
        (spoilt("a.csv", "role,prompt\n,b\n"), "row 1: give a role"),
        (spoilt("a.csv", "role,prompt\na,\nb,c\n"), "number 0, counted from 0, is empty"),
        (spoilt("a.csv", "role,prompt,keywords\na,b,no list\n"), "row 1: keywords is 'no list'; give a list"),
        (spoilt("a.csv", b"role,prompt\na,\xff\n"), "cannot be read as a table"),
        (spoilt("a.jsonl", '{"role": "a", "prompt": "b"}\n[1]\n'), "line 2 is not a JSON object"),
        (spoilt("a.jsonl", '{"role": "a", "prompts": []}\n'), "row 1: give a role"),
        (spoilt("a.jsonl", '{"role": "a", "prompt": "b"}\n'), "1 roles; give two or more"),
        (spoilt("a.parquet", "x"), "is not a Parquet table"),
        (lambda folder: folder, "holds no role"),
        (lambda folder: folder / "nothing.csv", "cannot be read as a table"),
        (
            lambda folder: spoilt("a.yaml", "name: a\nprompt: [b]\n")(folder).parent,
            "a.yaml cannot be read as roles: .*prompt",
        ),
        (
            lambda folder: spoilt("a.yaml", "name: a\nprompts: [b]\nprompts: [c]\n")(folder).parent,
            r"a.yaml has 'prompts' \(line 3\) twice in one mapping",
        ),
        (
            lambda folder: spoilt("a.json", '{"instruction": [{"neg": "b"}]}')(folder).parent,
            "a.json cannot be read as roles",
        ),
    ],
)
def test_a_malformed_file_is_refused_by_name(write, said, tmp_path) -> None:
    """The message says which file, which row, and what to give."""
    with pytest.raises(InvalidFile, match=said):
        load_roles(write(tmp_path), questions=QUESTIONS)


def test_questions_must_be_said(tmp_path) -> None:
    """By the folder, or beside the table."""
    path = table(tmp_path / "r.csv", ROWS)
    with pytest.raises(InvalidFile, match="has no questions; give"):
        load_roles(path)
    with pytest.raises(InvalidFile, match="row 1: there is no text in the column 'question'"):
        load_roles(path, questions=path)


# What is asked, and by whom


@given(roles=st.integers(2, 40), count=st.integers(1, 41))
def test_shares_partition_the_roles(roles, count) -> None:
    """Each role, and the assistant, is of one share; no share is empty."""
    found = RoleSet(tuple(Role(f"r{number}", ("Be.",)) for number in range(roles)), QUESTIONS)
    settings = RoleSettings(roles=found, min_kept=1)
    if count > roles + 1:
        with pytest.raises(InvalidSetting, match=f"there are {roles + 1} roles"):
            share_of(settings, (0, count))
        return
    shares = [share_of(settings, (which, count)) for which in range(count)]
    assert all(shares)
    assert sorted(name for share in shares for name in share) == sorted((ASSISTANT, *found.names))
    with pytest.raises(InvalidSetting, match="give 0/n to n-1/n"):
        share_of(settings, (count, count))


def test_requests_are_questions_by_prompts_each_with_a_seed_of_its_own() -> None:
    """The same whatever else is asked, and the first questions and prompts where fewer are wanted."""
    settings = RoleSettings(roles=PAIR, samples=2, min_kept=1)
    found = list(requests_of(settings, "poet"))
    assert [one.id for one in found[:3]] == ["poet/0/0/0", "poet/0/0/1", "poet/0/1/0"]
    assert (len(found), len({one.seed for one in found})) == (12, 12)
    fewer = msgspec.structs.replace(settings, n_questions=2, n_prompts=1)
    assert list(requests_of(fewer, "poet")) == found[:4]
    assert [one.system_prompt for one in requests_of(fewer, ASSISTANT)] == [""] * 4
    assert len(cases_of(fewer)) == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_questions": 1}, "n_questions=1; give 2 or more"),
        ({"read_together": 0}, "read_together=0"),
        ({"min_kept": 4}, "assistant is asked for 3 answers"),
        ({"roles": ("pirate",)}, "give a RoleSet"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"read_system": 1}, "read_system=1"),
        ({"scorer_args": {"api_key": "x"}}, "put it into an environment variable"),
        ({"layers": "some"}, "layers='some'"),
        ({"scorer": 3}, "scorer=3; give a name"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, said) -> None:
    """Before a model is asked."""
    with pytest.raises(InvalidSetting, match=said):
        RoleSettings(**{"roles": PAIR, "min_kept": 1, **changes})


def test_only_what_a_stage_depends_on_changes_it() -> None:
    """A threshold reads again and asks nothing again; another role's prompts change nothing of this one."""
    settings = RoleSettings(roles=PAIR, min_kept=1)

    def digests(**changed):
        return digests_of(described(msgspec.structs.replace(settings, **changed)), {"name": "m"}, "pirate")

    before = digests()
    assert {name for name, value in digests(threshold=60).items() if value != before[name]} == {"read"}
    assert digests(concurrency=3) == before
    other = msgspec.structs.replace(PAIR, roles=(PAIR.roles[0], Role("poet", ("Rhyme.",))))
    assert digests(roles=other) == before
    assert {name for name, value in digests(seed=1).items() if value != before[name]} == {"generate", "score", "read"}


def test_how_hard_a_judge_tries_scores_no_role_again(tmp_path) -> None:
    """A folder keeps the arguments that its marks are of, unless scores would differ."""

    def opened(**more):
        arguments = {"base_url": "http://h/v1", "model": "j", **more}
        settings = RoleSettings(roles=PAIR, min_kept=1, scorer="judge", scorer_args=arguments)
        return open_folder(tmp_path, {"name": "m"}, settings).roles["pirate"]

    opened().finish("score")
    assert opened(concurrency=2).is_done("score")
    assert opened(logprobs=True).is_done("score")  # as by default
    assert not opened(logprobs=False).is_done("score")


def test_equal_numbers_are_the_same_settings(tmp_path) -> None:
    """Whole or not: nothing that is done is done again."""

    def opened(number: float):
        settings = RoleSettings(roles=PAIR, min_kept=1, temperature=number, top_p=number, threshold=number)
        return open_folder(tmp_path / str(first), {"name": "m"}, settings).roles["pirate"]

    for first, other in ((1, 1.0), (1.0, 1)):
        for stage in ("generate", "score", "read"):
            opened(first).begin(stage)
            opened(first).finish(stage)
            assert opened(other).is_done(stage)
        assert opened(first).is_done("read")


def test_a_folder_knows_what_it_is_of(tmp_path) -> None:
    """Other answers are refused, with the difference; roles come and go; what is missing is named."""
    settings = RoleSettings(roles=PAIR, min_kept=1)
    folder = open_folder(tmp_path, {"name": "m"}, settings)
    assert folder.missing == [ASSISTANT, "pirate", "poet"]
    with pytest.raises(RunUnfinished, match="3 of 3 roles are not done: assistant, pirate, poet; run it again"):
        load_roles_run(tmp_path)
    with pytest.raises(RunDiffers, match=r"\.samples was 1, is 2"):
        check_same(tmp_path, msgspec.structs.replace(settings, samples=2))
    with pytest.raises(RunDiffers, match="max_tokens was 512, is 7"):
        check_same(tmp_path, msgspec.structs.replace(settings, max_tokens=7))
    with pytest.raises(RunDiffers, match=r"name was 'm', is 'n'"):
        open_folder(tmp_path, {"name": "n"}, settings)
    added = RoleSet((*PAIR.roles[:1], Role("king", ("Rule.",))), QUESTIONS)
    again = open_folder(tmp_path, {"name": "m"}, msgspec.structs.replace(settings, roles=added))
    assert list(again.roles) == [ASSISTANT, "pirate", "king"]
    assert set(again.definition.settings["roles"]["roles"]) == {"pirate", "poet", "king"}
    assert again.settings.roles == added
    (tmp_path / "roles" / "king").mkdir(parents=True)
    (tmp_path / "roles" / "king" / "state.json").write_text("{")
    with pytest.raises(InvalidFile, match=r"king/state.json cannot be read"):
        _ = again.missing


def test_answers_that_would_be_equal_are_not_begun(tmp_path) -> None:
    """A new folder has none that count as several; one of before is resumed."""
    settings = RoleSettings(roles=PAIR, min_kept=1, temperature=0, samples=2)
    for begin in (lambda: check_same(tmp_path / "a", settings), lambda: open_folder(tmp_path / "a", {}, settings)):
        with pytest.raises(InvalidSetting, match="samples=2 at temperature 0 would all be the same text"):
            begin()
    assert not (tmp_path / "a").exists()
    open_folder(tmp_path / "a", {}, msgspec.structs.replace(settings, samples=1))
    RUN.write(tmp_path, RolesDefinition(1, {}, described(settings), PAIR.names))
    check_same(tmp_path, settings)
    assert list(open_folder(tmp_path, {}, settings).roles) == [ASSISTANT, "pirate", "poet"]


def test_marks_go_before_results_change(tmp_path) -> None:
    """A stage that begins under other settings takes the later ones' marks, and parts of other settings, with it."""
    settings = RoleSettings(roles=PAIR, min_kept=1)
    role = open_folder(tmp_path, {"name": "m"}, settings).roles["poet"]
    for stage in ("generate", "score", "read"):
        role.begin(stage)
        role.parts(stage).mkdir(parents=True)
        role.finish(stage)
        assert not role.parts(stage).exists()
    assert role.is_done("read")
    other = role.path / "parts" / "score-0000000000000000"
    other.mkdir(parents=True)
    changed = msgspec.structs.replace(settings, scorer_args={"density": 0.1})
    open_folder(tmp_path, {"name": "m"}, changed).roles["poet"].begin("score")
    assert (role.is_done("generate"), role.is_done("score"), role.is_done("read")) == (True, False, False)
    assert not other.exists()


def test_answers_without_a_token_or_a_score_are_not_kept() -> None:
    """At the threshold they are."""

    class Answer(msgspec.Struct):
        token_ids: tuple[int, ...]

    found = [Answer((1,)), Answer(()), Answer((2,)), Answer((3,))]
    settings = RoleSettings(roles=PAIR, min_kept=1, threshold=50)
    assert kept_of(settings, found, None) == [found[0], found[2], found[3]]
    assert kept_of(settings, found, [50.0, 90.0, None, 49.9]) == [found[0]]


class Letters:
    """A tokenizer, and a model of a context of `max_model_len` tokens that fails at its read number `fails`.

    Tokens of a prompt are its letters. The row of an answer is the mean of its ids.
    """

    def __init__(self, max_model_len: int, fails: int = 99) -> None:
        self.tokenizer, self.max_model_len, self.fails, self.reads = self, max_model_len, fails, 0

    def apply_chat_template(self, messages: Any, **_options: Any) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, **_options: Any) -> list[int]:
        return [ord(letter) for letter in text]

    async def tokenize(self, text: Any, **_options: Any) -> list[int]:
        return list(text) if isinstance(text[0], int) else self.encode(self.apply_chat_template(text))

    async def read(self, prompts: Any, *, capture: Any, **_unsteered: Any) -> list[Any]:
        if self.reads == self.fails:
            raise WorkerFailure("dead")
        self.reads += 1
        found = []
        for prompt, spec in zip(prompts, capture, strict=True):
            ids = prompt["prompt_token_ids"]
            places = selected(spec.tokens.ranges(len(ids), len(ids)), len(ids)).nonzero()[0]
            rows = torch.tensor([[np.mean([ids[place] for place in places])]])
            found.append(SimpleNamespace(captures={0: rows}, points=(Point(0, "resid_post"),)))
        return found

    async def fetch_captures_batch(self, _handles: Any) -> None:
        """Nothing is left to fetch."""


async def read_by(model: Any, folder: Path, tokens: int = 1) -> tuple[int, list[float]]:
    """Finish a role whose answers, of equal tokens, are written in a folder; return its number of answers kept and its mean rows."""
    settings = RoleSettings(roles=PAIR, min_kept=1, read_together=1)
    role = open_folder(folder, {"name": "m"}, settings).roles["poet"]
    if not role.is_done("generate"):
        asked = requests_of(settings, "poet")
        _write(
            role,
            [
                RoleResponse(
                    **msgspec.structs.asdict(one),
                    answer="a",
                    token_ids=tuple(100 * one.question + one.prompt + 10 * place for place in range(tokens)),
                    finish="stop",
                )
                for one in asked
            ],
        )
    await _finish(model, settings, role, Count("read", 6, 0, None))
    header, means, _ = load_part(role.path / "rows.safetensors")
    assert (header.questions, sum(header.counts)) == ((0, 1, 2), role.outcome.kept)
    return role.outcome.kept, means.flatten().tolist()


@pytest.mark.parametrize("fails", [99, 3])
async def test_a_longer_context_has_room_for_answers_that_are_read_then(fails, tmp_path) -> None:
    """Of a role that was read with a shorter one, whether to its end or not, rows are those of one undisturbed read."""
    first = Letters(25, fails)
    with contextlib.nullcontext() if fails == 99 else pytest.raises(WorkerFailure):
        assert await read_by(first, tmp_path) == (5, [0.5, 101.0, 200.5])
        assert await read_by(first, tmp_path) == (5, [0.5, 101.0, 200.5])
    assert first.reads == min(fails, 5)
    longer = Letters(99)
    assert await read_by(longer, tmp_path) == (6, [0.5, 100.5, 200.5])
    assert longer.reads == {99: 6, 3: 4}[fails]
    assert await read_by(longer, tmp_path) == (6, [0.5, 100.5, 200.5])
    assert longer.reads == {99: 6, 3: 4}[fails]


async def test_answers_that_were_cut_are_read_again_where_there_is_room_for_more_of_them(tmp_path) -> None:
    """The number of answers with room is the same."""
    whole, again = Letters(99), Letters(99)
    wanted = await read_by(whole, tmp_path / "whole", 5)
    short = Letters(28)
    cut = await read_by(short, tmp_path / "parts", 5)
    assert cut[0] == wanted[0] == 6
    assert cut[1] != wanted[1]
    assert await read_by(again, tmp_path / "parts", 5) == wanted
    assert again.reads == 6
    assert await read_by(again, tmp_path / "parts", 5) == wanted
    assert again.reads == 6
    assert await read_by(Letters(28), tmp_path / "parts", 5) == wanted, "rows of all tokens are the better ones"


def test_a_finished_role_of_an_older_folder_is_not_read_again_for_want_of_a_number(tmp_path) -> None:
    """Its outcome has no number of tokens."""
    role = open_folder(tmp_path, {"name": "m"}, RoleSettings(roles=PAIR, min_kept=1)).roles["poet"]
    role.finish("read", outcome=RoleOutcome(6, 6, 0, None))
    assert _is_read(role, dict.fromkeys("abcdef", 5))
    assert not _is_read(role, dict.fromkeys("abcde", 5))


# The axis

WIDTH = 48


def synthetic(roles: int = 12, questions: int = 10, layers: int = 2, noise: float = 0.3, seed: int = 0):
    """Rows whose roles lie along one known direction, the assistant beyond them on its positive side."""
    drawn = torch.Generator().manual_seed(seed)
    direction = torch.randn(WIDTH, generator=drawn, dtype=torch.float64)
    direction /= direction.norm()
    shared = torch.randn(layers, questions, WIDTH, generator=drawn, dtype=torch.float64) * 2  # what questions do to all
    places = [*torch.linspace(-3, 2, roles).tolist(), 4.0]
    means = {
        name: shared + place * direction + noise * torch.randn(layers, questions, WIDTH, generator=drawn)
        for name, place in zip([*(f"r{number:02}" for number in range(roles)), ASSISTANT], places, strict=True)
    }
    return RoleRows.of({name: rows.float() for name, rows in means.items()}, model="m"), direction


@pytest.mark.parametrize("how", ["contrast", "pca"])
def test_the_axis_is_the_direction_that_was_put_in(how) -> None:
    """It points to the assistant, whose position is the greatest; roles keep their order; it carries as far as it should."""
    rows, direction = synthetic()
    axis = assistant_axis(rows, how)
    for layer in rows.layers:
        assert float(axis.vectors[layer].double() @ direction) / axis.vectors.norms()[layer] > 0.98
        assert axis.cosine[layer] > 0.97
        assert axis.standing[layer] > 2
        ranked = [name for name, _ in axis.ranked(layer)]
        assert (ranked, ranked[-1]) == ([*sorted(rows.names), ASSISTANT], ASSISTANT)
        assert axis.vectors.norms()[layer] == pytest.approx(axis.positions[ASSISTANT][layer], rel=1e-5)
        assert sum(axis.positions[name][layer] for name in rows.names) == pytest.approx(0, abs=1e-6)


def test_the_assistants_side_is_the_positive_one_wherever_it_lies() -> None:
    """All rows mirrored, the axis is mirrored too, and the assistant is still on its positive side."""
    rows, _ = synthetic()
    mirrored = RoleRows.of(
        {name: torch.stack([-rows.at(name, layer).float() for layer in (0, 1)]) for name in rows.counts}
    )
    for how in ("contrast", "pca"):
        one, other = assistant_axis(rows, how), assistant_axis(mirrored, how)
        assert torch.allclose(one.vectors[1], -other.vectors[1], atol=1e-5)
        assert one.positions[ASSISTANT][1] == pytest.approx(other.positions[ASSISTANT][1], rel=1e-5)


def test_components_are_those_of_numpy() -> None:
    """Shares of variance and the first component are those of a singular value decomposition."""
    rows, _ = synthetic(noise=1.0)
    axis = assistant_axis(rows, "pca")
    found = rows.means(0)[0].numpy()
    _, sizes, components = np.linalg.svd(found - found.mean(0), full_matrices=False)
    shares = sizes**2 / (sizes**2).sum()
    assert np.allclose(axis.explained[0], shares[:11], atol=1e-9)
    unit = axis.vectors[0].double().numpy()
    assert abs(unit @ components[0]) / np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)


def test_a_mean_is_over_answers_and_not_over_questions() -> None:
    """Rows of questions count as often as they have answers, those without none."""
    rows = torch.arange(12.0).view(1, 3, 4)
    counts = {"a": (1, 3, 0), "b": (1, 1, 1), ASSISTANT: (2, 2, 2)}
    found = RoleRows(counts, (5,), lambda _name, _layer: rows[0])
    assert torch.equal(found.mean("a", 5), (rows[0, 0] + 3 * rows[0, 1]).double() / 4)
    assert found.at("a", 5)[2].tolist() == [0] * 4
    with pytest.raises(UnknownName, match="no rows of 'c'"):
        found.at("c", 5)
    with pytest.raises(LayerOutOfRange, match=r"layer 4 was not read; \[5\] were"):
        found.mean("a", 4)
    assert list(found.vectors()) == ["a", "b", ASSISTANT]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"a": (1,), "b": (1,)}, "give those of 'assistant' and of at least two roles"),
        ({"a": (1,), "b": (1, 1), ASSISTANT: (1,)}, "all roles are asked the same questions"),
        ({"a": (1,), "b": (0,), ASSISTANT: (1,)}, r"\['b'\] have no answers"),
    ],
)
def test_rows_that_give_no_axis_are_refused(counts, said) -> None:
    """With what is lacking."""
    with pytest.raises(InvalidSpec, match=said):
        RoleRows(counts, (0,), lambda _name, _layer: torch.ones(1, 4))


@pytest.mark.parametrize("count", [2, 3, 6, 10])
def test_an_assistant_that_is_the_mean_of_roles_has_no_axis(count) -> None:
    """But for rounding: a direction of it would be noise."""
    roles = torch.randn(count, 64, generator=torch.Generator().manual_seed(count)) * 10
    for rows, own in ((roles, roles.mean(0)), (roles[:1].repeat(count, 1), roles[0] + 1)):
        with pytest.raises(InvalidSpec, match="there is no axis"):
            directions(rows, own)


def test_roles_that_do_not_differ_have_no_axis() -> None:
    """And another way to find one is refused by the names of those known."""
    same = RoleRows.of(dict.fromkeys(("a", "b", ASSISTANT), torch.ones(1, 2, 4)))
    with pytest.raises(InvalidSpec, match="there is no axis"):
        assistant_axis(same)
    with pytest.raises(InvalidSpec, match="give 'contrast' or 'pca'"):
        assistant_axis(synthetic()[0], "mean")


def test_an_axis_comes_back_from_its_file(tmp_path) -> None:
    """All of it; another kind of file is refused with its reader."""
    axis = assistant_axis(synthetic()[0], "pca")
    found = AssistantAxis.load(axis.save(tmp_path / "axis.safetensors"))
    assert found.vectors == axis.vectors
    for name in ("how", "explained", "cosine", "standing", "positions", "provenance"):
        assert getattr(found, name) == getattr(axis, name), name
    with pytest.raises(InvalidFile, match=r"holds axis, not steering; read it with AssistantAxis.load"):
        SteeringSpec.load(tmp_path / "axis.safetensors")


# Stability


def test_an_axis_and_its_pictures_are_written_over_only_by_force(tmp_path) -> None:
    """As other files are; those of another kind of axis are none of its."""
    folder = shutil.copytree(Path(__file__).parent.parent / "stored" / "roles", tmp_path / "roles")
    assert call("persona", "axis", folder, "--splits", "1").exit_code == 0
    (folder / "positions-contrast.png").write_bytes(b"kept")
    done = call("persona", "axis", folder, "--splits", "1")
    assert (done.exit_code, "--force" in done.stderr) == (2, True), done.output
    assert (folder / "positions-contrast.png").read_bytes() == b"kept"
    assert call("persona", "axis", folder, "--splits", "1", "--how", "pca").exit_code == 0
    assert call("persona", "axis", folder, "--splits", "1", "--force").exit_code == 0
    assert (folder / "positions-contrast.png").read_bytes() != b"kept"


@pytest.mark.parametrize("over", ["questions", "roles"])
@pytest.mark.parametrize("how", ["contrast", "pca"])
def test_an_axis_that_is_there_is_found_in_both_halves(over, how) -> None:
    """And far above chance of either kind."""
    found = stability(synthetic()[0], over=over, splits=10)
    assert found.splits == 10
    for layer in found.layers:
        assert found.median(how)[layer] > 0.9
        assert found.median(how)[layer] > found.band(how, "random")[layer][1]
    assert max(found.median("contrast", "permuted").values()) < 0.6


def test_labels_that_mean_nothing_give_what_permuted_ones_give() -> None:
    """On rows without roles the axis is not found again, and the halves' cosines are those of chance."""
    drawn = torch.Generator().manual_seed(3)
    rows = RoleRows.of({name: torch.randn(1, 12, 64, generator=drawn) for name in [*"abcdefgh", ASSISTANT]})
    found = stability(rows, splits=40)
    for how in ("contrast", "pca"):
        low, high = found.band(how, "permuted")[0]
        assert low - 0.1 < found.median(how)[0] < high + 0.1


def test_random_vectors_are_as_near_as_they_must_be() -> None:
    """Magnitudes of cosines of independent directions are sqrt(2 / (pi width)) on the mean."""
    drawn = torch.Generator().manual_seed(0)
    rows = RoleRows.of({name: torch.randn(4, 4, 256, generator=drawn) for name in [*"abcdef", ASSISTANT]})
    found = stability(rows, splits=100, seed=1)
    for how in ("contrast", "pca"):
        mean = float(np.abs(found.cosines[how, "random"]).mean())
        assert mean == pytest.approx(math.sqrt(2 / (math.pi * 256)), rel=0.12)
    assert float(found.cosines["pca", "random"].min()) >= 0  # a component has no sign


def test_halves_share_nothing(monkeypatch) -> None:
    """Each question is in one half, and of `roles` each role; the means of halves are the halves of the whole mean."""
    rows, _ = synthetic(roles=6, questions=8, layers=1)
    seen = []
    found = halves.axes
    monkeypatch.setattr(halves, "axes", lambda *given: seen.append(given) or found(*given))
    stability(rows, over="roles", splits=3)
    roles, assistant, used = seen[0]  # of the rows as they are
    assert (roles.shape, used.shape) == ((3, 2, 6, WIDTH), (3, 2, 6))
    assert torch.equal(used[:, 0], ~used[:, 1])
    assert used.sum(-1).tolist() == [[3, 3]] * 3
    assert torch.allclose(assistant.mean(1), rows.mean(ASSISTANT, 0).expand(3, -1))  # four questions each
    assert torch.allclose(roles.mean(1), rows.means(0)[0].expand(3, -1, -1))
    assert float((assistant[:, 0] - assistant[:, 1]).norm(dim=-1).min()) > 0.1


def test_axes_of_some_of_the_roles_are_those_of_these_alone() -> None:
    """All sets at once, each with roles of its own, as one by one."""
    drawn = torch.Generator().manual_seed(0)
    roles = torch.randn(5, 7, 20, generator=drawn, dtype=torch.float64)
    assistant = torch.randn(5, 20, generator=drawn, dtype=torch.float64)
    used = torch.rand(5, 7, generator=drawn) > 0.4
    found = axes(roles, assistant, used)
    for place in range(5):
        alone = directions(roles[place][used[place]], assistant[place])
        assert torch.allclose(found.contrast[place], alone.contrast)
        assert torch.allclose(found.pca[place], alone.pca)


def test_a_half_without_the_assistant_has_no_axis() -> None:
    """Its cosine is NaN, and left out of medians."""
    drawn = torch.Generator().manual_seed(0)
    read = {name: torch.randn(3, 16, generator=drawn) for name in ("a", "b", "c", ASSISTANT)}
    counts = {"a": (1, 1, 1), "b": (1, 1, 1), "c": (1, 1, 1), ASSISTANT: (1, 1, 0)}
    found = stability(RoleRows(counts, (0,), lambda name, _layer: read[name]), splits=30)
    values = found.cosines["contrast", "found"]
    assert 0 < np.isnan(values).sum() < 30
    assert not math.isnan(found.median()[0])


def test_what_cannot_be_halved_is_refused() -> None:
    """With the number that is needed."""
    rows, _ = synthetic(roles=3)
    with pytest.raises(InvalidSpec, match="four roles"):
        stability(rows, over="roles")
    with pytest.raises(InvalidSpec, match="give 'questions' or 'roles'"):
        stability(rows, over="layers")
    with pytest.raises(InvalidSpec, match="splits=0"):
        stability(rows, splits=0)


# Capping

AXIS = assistant_axis(synthetic()[0])


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30), st.floats(0, 100))
def test_floors_are_percentiles_as_numpy_has_them(values, percentile) -> None:
    """Of each layer its own."""
    made = capping(AXIS, {1: torch.tensor(values)}, percentile=percentile)
    (edit,) = made.spec.flat()
    assert (
        edit.low == made.floors[1] == float(np.percentile(np.array(values, dtype=np.float32).astype(float), percentile))
    )
    assert (edit.layer, edit.high, list(made.floors)) == (1, None, [1])


class Reader:
    """A model of a context of 6 tokens; the row of a token is its id, everywhere."""

    max_model_len = 6

    async def tokenize(self, text: Any, **_options: Any) -> list[int]:
        """Ids stay as they are."""
        return list(text)

    async def read(self, prompts: Any, *, capture: Any, **_unsteered: Any) -> list[Any]:
        """Return the rows of texts that leave room for a token, as vLLM does."""
        found = []
        for prompt, spec in zip(prompts, capture, strict=True):
            ids = prompt["prompt_token_ids"]
            if len(ids) >= self.max_model_len:
                raise InvalidPrompt(f"{len(ids)} tokens")
            places = selected(spec.tokens.ranges(len(ids), len(ids)), len(ids)).nonzero()[0]
            rows = torch.tensor([[float(ids[place])] for place in places])
            found.append(SimpleNamespace(captures=dict.fromkeys(spec.layers, rows)))
        return found

    async def fetch_captures_batch(self, _handles: Any) -> None:
        """Nothing is left to fetch."""


async def test_an_answer_that_filled_the_context_is_read_without_its_last_token() -> None:
    """Its row was never computed; a longer one is of another model, and is refused."""
    model: Any = Reader()
    vectors = LayerVectors({1: torch.ones(1)})
    short, full = Exchange([1, 2], [3, 4]), Exchange([1, 2], [3, 4, 5, 6])
    found = await token_projections(model, vectors, [short, full])
    assert found[1].tolist() == [3, 4, 3, 4, 5]
    with pytest.raises(InvalidPrompt):
        await token_projections(model, vectors, [Exchange([1, 2], [3, 4, 5, 6, 7])])


def test_a_floor_is_saved_with_its_provenance_and_read_as_steering(tmp_path) -> None:
    """The same configuration; what it was made of stands in the header, and files without it are as they were."""
    axis = assistant_axis(synthetic()[0])
    made = capping(axis, {0: torch.arange(9.0), 1: torch.arange(9.0) * 2}, percentile=25)
    path = made.save(tmp_path / "cap.safetensors")
    found = SteeringSpec.load(path)
    assert [(edit.layer, edit.low, edit.high) for edit in found.flat()] == [(0, 2.0, None), (1, 4.0, None)]
    assert all(torch.equal(one.vector, axis.vectors[one.layer]) for one in found.flat())
    header = read_header(path)
    assert (header.model, header.provenance["percentile"], header.provenance["projections by layer"]) == (
        "m",
        "25",
        "0: 9, 1: 9",
    )
    plain = found.save(tmp_path / "plain.safetensors")
    assert read_header(plain).provenance == {}
    assert b'"provenance"' not in plain.read_bytes()


def test_a_floor_is_what_published_files_say_of_the_vector_turned_round(tmp_path) -> None:
    """h - v min(h.v - floor, 0): a ceiling of -floor on -v."""
    axis = assistant_axis(synthetic()[0])
    (ours,) = capping(axis, {1: torch.arange(5.0)}, percentile=50).spec.flat()
    config = {
        "vectors": {"v": {"vector": -axis.vectors[1], "layer": 1}},
        "experiments": [{"id": "e", "interventions": [{"vector": "v", "cap": -2.0}]}],
    }
    torch.save(config, tmp_path / "capping.pt")
    (theirs,) = load_capping(tmp_path / "capping.pt")["e"].flat()
    rows = torch.randn(20, WIDTH) * 5
    unit = axis.vectors[1] / axis.vectors[1].norm()
    wanted = rows - (rows @ unit - 2.0).clamp(max=0)[:, None] * unit
    for edit in (ours, theirs):
        assert torch.allclose(_capped(edit, rows), wanted, atol=1e-5)


def _capped(edit: Cap, rows: torch.Tensor) -> torch.Tensor:
    """What the compiled edit does: a step along one direction by the clamped projection on another."""
    (one,) = edit.lower()
    read, write = (torch.as_tensor(vector, dtype=torch.float32).flatten() for vector in (one.read, one.write))
    place = rows @ read
    held = place.clamp(one.response.low, one.response.high)
    return rows + (one.response.gain * held - one.response.minus * place)[:, None] * write


@pytest.mark.parametrize(
    ("values", "percentile", "error", "said"),
    [
        ({0: torch.ones(3)}, 101, InvalidSpec, "a number from 0 to 100"),
        ({0: torch.ones(3)}, "25", InvalidSpec, "a number from 0 to 100"),
        ({0: torch.ones(0)}, 25, InvalidSpec, "give finite numbers in a row"),
        ({0: torch.tensor([math.nan])}, 25, InvalidSpec, "give finite numbers in a row"),
        ({0: torch.ones(2, 2)}, 25, InvalidSpec, "give finite numbers in a row"),
        ({7: torch.ones(3)}, 25, LayerOutOfRange, r"layers \[7\] have no vector"),
        ({}, 25, InvalidSpec, "give one or more of"),
    ],
)
def test_floors_of_nothing_are_refused(values, percentile, error, said) -> None:
    """Rather than being a number that means nothing."""
    with pytest.raises(error, match=said):
        capping(assistant_axis(synthetic()[0]), values, percentile=percentile)


# What changes


def records(changed: float = 1.0, questions: int = 6) -> list[CapRecord]:
    """Two roles and a drift prompt for each question; the condition adds `changed` to all numbers."""
    found = []
    for condition, extra in (("plain", 0.0), ("capped", changed)):
        for question in range(questions):
            for role in ("pirate", "poet", ""):
                value = question + extra
                case = Case("role" if role else "drift", role, question, question, "", "?")
                score = None if not role else 40.0 + 20 * extra
                found.append(
                    CapRecord(
                        case, condition, "", 10 + int(extra), {3: value}, {3: value / 2}, score, math.exp(1 + extra)
                    )
                )
    return found


def test_changes_are_of_pairs() -> None:
    """Means before and after, their difference, of perplexity the factor; scores become shares; drift has none."""
    found = {(one.kind, one.measure): one for one in changes(records(), 3)}
    assert set(found) == {
        (kind, measure)
        for kind in ("role", "drift")
        for measure in ("projection", "projection read", "in role", "tokens", "perplexity")
    } - {("drift", "in role")}
    one = found["role", "projection"]
    assert (one.before, one.after, one.change, one.low, one.high, one.count) == (2.5, 3.5, 1, 1, 1, 12)
    assert (found["role", "in role"].before, found["role", "in role"].after) == (0, 1)
    factor = found["drift", "perplexity"]
    assert (factor.before, factor.change) == (pytest.approx(math.e), pytest.approx(math.e))
    with pytest.raises(InvalidSpec, match="no projections at layer 4"):
        changes(records(), 4)
    with pytest.raises(InvalidSpec, match="6 answers have no counterpart"):
        changes([one for one in records() if one.condition == "capped" or one.case.role != ""], 3)


# Pictures


def test_a_picture_of_changes_is_of_pairs() -> None:
    """An answer that has no number under one condition counts under neither."""
    from matplotlib.figure import Figure

    silent = [
        msgspec.structs.replace(one, projection={3: math.nan})
        if one.condition == "capped" and one.case.question == 0
        else one
        for one in records()
    ]
    axes = Figure().subplots()
    plot_changes(silent, 3, axes, condition="capped")
    assert [list(line.get_xdata()) for line in axes.lines] == [[3.0] * 3, [4.0] * 3]
    assert {one.before for one in changes(silent, 3) if one.measure == "projection"} == {3.0}


def test_pictures_are_drawn_to_files_and_axes(tmp_path) -> None:
    """Each is a picture of some size, and none is left half-written."""
    from matplotlib.figure import Figure

    rows, _ = synthetic()
    axis = assistant_axis(rows)
    plot_positions(axis, 1, tmp_path / "a.png")
    plot_roles(rows, 1, tmp_path / "b.png")
    plot_stability(stability(rows, splits=3), tmp_path / "c.svg", how="pca")
    plot_changes(records(), 3, tmp_path / "d.png", condition="capped")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("a.png", "b.png", "c.svg", "d.png"))
    assert len(list(tmp_path.iterdir())) == 4
    axes = Figure().subplots()
    plot_positions(axis, 0, axes)
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == ASSISTANT
    with pytest.raises(InvalidSpec, match="beside each other"):
        plot_changes(records(), 3, tmp_path / "e.png", condition="other")
    with pytest.raises(InvalidSpec, match="give three roles or more"):
        plot_roles(synthetic(roles=2)[0], 0, tmp_path / "e.png")


@pytest.mark.parametrize("count", [40, 90, 276])
def test_the_assistant_is_named_among_any_number_of_roles(count) -> None:
    """Where not all names have room, the axis says which are written; none on another."""
    from matplotlib.figure import Figure

    ranked = [(f"role {at}", float(at)) for at in range(count - 1)] + [(ASSISTANT, 1e3)]
    axes = Figure().subplots()
    plot_positions(SimpleNamespace(ranked=lambda _layer: ranked, how="contrast"), 5, axes)
    names = [label.get_text() for label in axes.get_yticklabels()]
    places = [int(place) for place in axes.get_yticks()]
    assert names == [ranked[place][0] for place in places]
    assert ASSISTANT in names
    step = {40: 1, 90: 2, 276: 5}[count]
    assert min(other - one for one, other in pairwise(sorted(places))) >= step
    assert len(names) <= 60
    assert (f"every {step}th name" in axes.get_xlabel()) is (step > 1)


# Several processes


@pytest.mark.slow
def test_a_process_for_each_device_takes_its_share(tmp_path, capsys) -> None:
    """Each runs the command with its own share; what fails is said, with its log, and stops no other."""
    assert roles_batch.command_of(["roles.csv", "--small"], 1, 2, tmp_path)[3:] == [
        *("persona", "roles", "roles.csv", "--small", "--shard", "1/2", "--out", str(tmp_path), "--json")
    ]
    assert roles_batch.environment_of("3")["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(typer.Exit) as ended:
        roles_batch.main([str(tmp_path / "nothing.csv")], tmp_path / "out", "cpu,cpu")
    assert ended.value.exit_code == 1
    told = capsys.readouterr().out
    for which in (0, 1):
        assert f"share {which}/2 on cpu: exit code 1" in told
        assert "nothing.csv cannot be read as a table" in (tmp_path / "out" / f"share-{which}.log").read_text()
    with pytest.raises(typer.BadParameter, match="given here"):
        roles_batch.main(["--shard", "0/2"], tmp_path, "cpu")
