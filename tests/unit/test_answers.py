"""Answers that exist, without an engine: their files, the means of a model that is a formula, levels, and ends at any moment."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from steercap.adapters.gpus import Gpu, GpuProcess
from steercap.core.spec import Point
from steercap.engine import memory
from steercap.engine.checkpoint import look_up
from steercap.engine.memory import check_memory, require_room, weights_in
from steercap.errors import InvalidFile, InvalidPrompt, InvalidRequest, ModelTooLarge, RunDiffers, UnknownName
from steercap.files.folder import locked
from steercap.lab.personas import read_answers, read_answers_by_dtype
from steercap.lab.personas.answer_files import read_scores
from steercap.lab.personas.answer_folder import RowsFile
from steercap.testing import tiny_checkpoint, tokenizer

LAYERS, HIDDEN, CONTEXT = 3, 5, 120
TEMPLATE = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


class Killed(Exception):
    """A run ends here."""


def ending(left: list[int], work: Any) -> Any:
    """A function that works until the count in `left` comes to 0, where it ends the run before it does anything."""

    def done(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return work(*given, **named)

    return done


def row(token: int, position: int) -> np.ndarray:
    """The formula of the model: [layers, hidden] of a token at a position."""
    grid = np.arange(LAYERS * HIDDEN, dtype=np.float64).reshape(LAYERS, HIDDEN)
    return np.cos(grid * 0.37 + token * 0.11 + position * 0.05).astype(np.float32) + token / 50


class Formula:
    """A model that is a formula; it may end in any read."""

    def __init__(self, name: str = "formula", ends_in: int | None = None) -> None:
        self.model, self.num_layers, self.hidden_size, self.max_model_len = name, LAYERS, HIDDEN, CONTEXT
        self.tokenizer = tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.read_prompts: list[list[int]] = []
        self.ends_in = ends_in

    def identity(self) -> dict[str, str]:
        return {"name": self.model}

    def check_capture(self, spec: Any) -> None:
        assert spec.points(LAYERS) == tuple(Point(layer, "resid_post") for layer in range(LAYERS))

    async def read(self, prompts: list[dict[str, Any]], *, capture: list[Any], steering: Any) -> list[Any]:
        assert steering is None
        found = []
        for prompt, spec in zip(prompts, capture, strict=True):
            if len(self.read_prompts) == self.ends_in:
                raise Killed
            ids, (kept,) = prompt["prompt_token_ids"], spec.selection.ranges(*[len(prompt["prompt_token_ids"])] * 2)
            self.read_prompts.append(ids)
            assert spec.reduce == "mean"
            places = range(len(ids))[kept.start : kept.stop : kept.step]
            mean = np.mean([row(ids[place], place).astype(np.float64) for place in places], axis=0)
            rows = torch.tensor(mean, dtype=torch.float32)
            found.append(SimpleNamespace(captures={Point(at, "resid_post"): rows[at][None] for at in range(LAYERS)}))
        return found

    async def fetch_captures_batch(self, handles: list[Any]) -> None:
        assert handles


def mean_of(conversation: list[dict[str, str]]) -> np.ndarray:
    """Mean over the answer's bytes, [layers, hidden], the template written out by hand."""
    before = "".join(f"{one['role'][0]}:{one['content']};" for one in conversation[:-1]) + "a:"
    answer = conversation[-1]["content"]
    ids = tokenizer().encode(answer, add_special_tokens=False)
    first = len(tokenizer().encode(before, add_special_tokens=False))
    return np.mean([row(token, first + at).astype(np.float64) for at, token in enumerate(ids)], axis=0)


def written(folder: Path, kind: str, seed: int = 1) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Write answers and scores of four personas, and return the conversations by persona and key."""
    rng, found = random.Random(seed), {}
    (folder / "responses").mkdir(parents=True)
    (folder / "extract_scores").mkdir()
    names = ("brave", "calm", "default", "wry") if kind == "role" else ("brave", "calm", "wry")
    for name in names:
        labels = (
            ("default",) if name == "default" else ("pos", "default") if kind == "role" else ("pos", "neg", "default")
        )
        lines, mine, scores = [], {}, {}
        for label in labels:
            for place in range(12):
                key = f"{label}_p{place // 4}_q{place % 4}"
                system = [{"role": "system", "content": f"be {name}"}] if rng.random() < 0.5 else []
                told = "".join(rng.choice("abcdefg hij") for _ in range(rng.randint(3, 20)))
                talk = [{"role": "user", "content": f"{place}?"}, {"role": "assistant", "content": f"x{told}y"}]
                mine[key] = [*system, *talk]
                indices = {"prompt_index": place // 4, "question_index": place % 4}
                lines.append(
                    json.dumps({"conversation": mine[key], "label": label, **indices, "question": "a field of theirs"})
                )
                if label != "default" or kind == "trait":
                    scores[key] = "REFUSAL" if rng.random() < 0.1 else rng.randint(0, 3 if kind == "role" else 100)
        (folder / "responses" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        if name != "default":
            (folder / "extract_scores" / f"{name}.json").write_text(json.dumps(scores))
        found[name] = mine
    return found


def asked(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "responses": folder / "responses",
        "scores": folder / "extract_scores",
        "to": folder / "out",
        "minimum": 1,
    } | more


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its path, that of the lock aside."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
async def test_means_of_answers_and_of_roles(tmp_path, stored) -> None:
    """Each answer's mean, each score's, all default answers', by several models: NumPy finds the same."""
    talks = written(tmp_path, "role")
    models = [Formula(), Formula(), Formula()]
    result = await read_answers(models[0], others=models[1:], kind="role", stored=stored, **asked(tmp_path))
    digits = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[stored]
    for name, mine in talks.items():
        found = torch.load(tmp_path / "out/response_activations" / f"{name}.pt", weights_only=True)
        assert list(found) == list(mine)
        for key, talk in mine.items():
            assert found[key].dtype == getattr(torch, stored)
            np.testing.assert_allclose(found[key].float().numpy(), mean_of(talk), rtol=2 * digits, atol=1e-6)
        scores = json.loads((tmp_path / f"extract_scores/{name}.json").read_text()) if name != "default" else {}
        levels = torch.load(tmp_path / "out/vectors" / f"{name}.pt", weights_only=True)
        wanted = {f"pos_{score}": [key for key in mine if scores.get(key) == score] for score in range(4)}
        wanted["pos_all"] = [key for key, score in scores.items() if score != "REFUSAL"]
        wanted["default_1"] = [key for key in mine if key.startswith("default")]
        assert list(levels) == [level for level, keys in wanted.items() if keys]
        for level, rows in levels.items():
            assert rows.dtype == torch.float32
            mean = np.mean([found[key].double().numpy() for key in wanted[level]], axis=0)
            np.testing.assert_allclose(rows.numpy(), mean, rtol=1e-6, atol=1e-6)
        assert result.personas[name].levels == {level: len(wanted[level]) for level in levels}
        assert result.personas[name].answers == len(mine)
    default = torch.load(tmp_path / "out/default_vectors.pt", weights_only=True)["activations"]["default_1"]
    mean = np.mean([mean_of(talk) for talk in talks["default"].values()], axis=0)
    np.testing.assert_allclose(default.numpy(), mean, rtol=2 * digits, atol=1e-5)
    assert result.default == 12
    assert all(model.read_prompts for model in models)
    assert sum(len(model.read_prompts) for model in models) == sum(map(len, talks.values()))


async def test_traits_are_differences_over_pairs(tmp_path) -> None:
    """`pos_neg_50` is over pairs whose scores are more than 50 apart, and says how many pairs were left out."""
    talks = written(tmp_path, "trait", seed=4)
    result = await read_answers(Formula(), kind="trait", **asked(tmp_path))
    used = 0
    for name, mine in talks.items():
        scores = json.loads((tmp_path / f"extract_scores/{name}.json").read_text())
        places = [key.removeprefix("pos") for key in mine if key.startswith("pos")]
        pairs = [place for place in places if "REFUSAL" not in {scores[f"pos{place}"], scores[f"neg{place}"]}]
        apart = [place for place in pairs if scores[f"pos{place}"] - scores[f"neg{place}"] > 50]
        levels = torch.load(tmp_path / "out/vectors" / f"{name}.pt", weights_only=True)
        for level, kept in (("pos_neg", pairs), ("pos_neg_50", apart)):
            assert (level in levels) == bool(kept)
            if kept:
                mean = np.mean([mean_of(mine[f"pos{at}"]) - mean_of(mine[f"neg{at}"]) for at in kept], axis=0)
                np.testing.assert_allclose(levels[level].numpy(), mean, rtol=1e-4, atol=1e-6)
        left_out = result.personas[name].left_out
        assert sum(left_out.get("pos_neg_50", {}).values()) == len(places) - len(apart)
        used += len(apart)
    assert used
    assert not (tmp_path / "out/default_vectors.pt").exists()


@pytest.mark.parametrize("concurrency", [1, 5, 40])
async def test_a_run_that_ends_at_any_moment_is_resumed_to_the_same_bytes(tmp_path, monkeypatch, concurrency) -> None:
    """Ends in reads and before operations on files; what was written down is not read again."""
    written(tmp_path / "a", "role")
    written(tmp_path / "b", "role")
    await read_answers(Formula(), kind="role", concurrency=concurrency, **asked(tmp_path / "a"))
    rng, reads, ends, put, replace = random.Random(concurrency), 0, 0, RowsFile.put, Path.replace
    left = [0]

    monkeypatch.setattr(RowsFile, "put", ending(left, put))
    monkeypatch.setattr(Path, "replace", ending(left, replace))
    monkeypatch.setattr(Path, "unlink", ending(left, Path.unlink))
    while True:
        by_file = rng.random() < 0.5
        left[0] = rng.randint(1, 30) if by_file else -1
        model = Formula(ends_in=None if by_file else rng.randint(1, 25))
        try:
            await read_answers(model, kind="role", concurrency=concurrency, **asked(tmp_path / "b"))
        except Killed:
            ends += 1
            continue
        finally:
            reads += len(model.read_prompts)
        break
    assert ends > 1
    assert digests(tmp_path / "b/out") == digests(tmp_path / "a/out")
    assert reads <= 84 + ends * max(2 * concurrency, 2)
    again = Formula()
    await read_answers(again, kind="role", **asked(tmp_path / "b"))
    assert not again.read_prompts
    assert not any((tmp_path / "b/out/parts").iterdir())


async def test_records_that_a_crash_tore_are_read_again(tmp_path) -> None:
    """Any changed byte of a record costs that answer, and no other."""
    path, keys = tmp_path / "x.rows", [f"pos_p0_q{index}" for index in range(9)]
    rows = RowsFile(path, keys, (LAYERS, HIDDEN), torch.bfloat16)
    assert rows.missing == list(range(9))
    for index in (7, 0, 3, 4):
        rows.put(index, torch.full((LAYERS, HIDDEN), index + 0.5))
    rows.close()
    data, size = bytearray(path.read_bytes()), 16 + LAYERS * HIDDEN * 2
    for index, at in ((3, 2), (4, 16), (7, size - 1)):
        data[index * size + at] ^= 1
        path.write_bytes(data)
    again = RowsFile(path, keys, (LAYERS, HIDDEN), torch.bfloat16)
    assert again.missing == [1, 2, 3, 4, 5, 6, 7, 8]
    assert torch.equal(again.rows()["pos_p0_q0"], torch.full((LAYERS, HIDDEN), 0.5, dtype=torch.bfloat16))
    with pytest.raises(InvalidFile, match="pos_p0_q1 are beyond"):
        RowsFile(tmp_path / "y.rows", keys, (LAYERS, HIDDEN), torch.float16).put(1, torch.full((LAYERS, HIDDEN), 1e6))


def line(label: str = "pos", prompt: Any = 0, question: Any = 0, talk: Any = None, **more: Any) -> str:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    asked = {"conversation": said if talk is None else talk, "label": label, "prompt_index": prompt}
    return json.dumps(asked | {"question_index": question} | more)


GOOD = [line(), line(question=1), line(question=2)]


def spoilt() -> Iterator[tuple[str, list[str] | str, str | None, str]]:
    """Something wrong: a name, lines or text of answers, scores, and what the error says."""
    scores = '{"pos_p0_q0": 1}'
    talks = [{"role": "assistant", "content": " \n"}], [{"role": "user", "content": "q"}], [{"role": "assistant"}], []
    yield "a key twice", [*GOOD, line(question=1)], scores, r"x\.jsonl, line 4, pos_p0_q1: line 2 has this key"
    yield "no scores", GOOD, None, r"x\.json cannot be read: there is no such file"
    yield "a score of no answer", GOOD, '{"pos_p0_q7": 1}', r"x\.json scores pos_p0_q7, .*x\.jsonl"
    yield (
        "an empty answer",
        [GOOD[0], line(question=1, talk=talks[0])],
        scores,
        r"line 2, pos_p0_q1: the answer is empty",
    )
    yield "no answer", [line(talk=talks[1])], scores, r"line 1, pos_p0_q0: the conversation ends in 'user'"
    yield "no content", [line(talk=talks[2])], scores, r"line 1, pos_p0_q0: message 0 is"
    yield "no message", [line(talk=talks[3])], scores, r"line 1, pos_p0_q0: the conversation ends in None"
    yield "a last line cut off", "\n".join(GOOD)[:-9], scores, r"line 3 \(the file ends in this line: it was cut off\)"
    yield "a line that is no JSON", [GOOD[0], "{", GOOD[1]], scores, r"x\.jsonl, line 2: "
    yield "another label", [line("positive")], scores, r"line 1: Invalid enum value 'positive'"
    yield "a negative index", [line(prompt=-1)], scores, r"line 1: Expected `int` >= 0"
    yield "an index that is none", [line(question=None)], scores, r"line 1: Expected `int`, got `null`"
    yield "no lines", "", scores, r"x\.jsonl cannot be read: it is empty"
    yield "blank lines", "\n\n", scores, r"x\.jsonl holds no answers"
    yield "scores that are none", GOOD, "[1]", r"x\.json holds \[1\]"
    yield "scores cut off", GOOD, scores[:-1], r"x\.json cannot be read as JSON"
    yield "a score twice", GOOD, '{"pos_p0_q0": 1, "pos_p0_q0": 2}', r"x\.json has the key 'pos_p0_q0' twice"
    for score in ("NaN", "true", "null", '"refused"', "[1]", "1e999"):
        yield f"the score {score}", GOOD, f'{{"pos_p0_q1": {score}}}', r"x\.json, pos_p0_q1: the score is"
    yield "a score out of range", GOOD, '{"pos_p0_q1": 4}', r"x\.json: answer 'pos_p0_q1' has score 4"


@pytest.mark.parametrize(("answers", "scores", "says"), [one[1:] for one in spoilt()], ids=[one[0] for one in spoilt()])
async def test_bad_input_is_refused_before_anything_is_read(tmp_path, answers, scores, says) -> None:
    """The error names the file, the line and the key; other personas, although right, are not begun."""
    written(tmp_path, "role")
    text = answers if isinstance(answers, str) else "\n".join(answers) + "\n"
    (tmp_path / "responses/x.jsonl").write_text(text)
    if scores is not None:
        (tmp_path / "extract_scores/x.json").write_text(scores)
    model = Formula()
    with pytest.raises(InvalidFile, match=says):
        await read_answers(model, kind="role", **asked(tmp_path))
    assert not model.read_prompts
    assert not (tmp_path / "out").exists()


async def test_what_does_not_fit_is_refused(tmp_path) -> None:
    """Other settings, another model, answers that have changed, too long, names, folders without answers."""
    written(tmp_path, "role")
    given = asked(tmp_path)
    await read_answers(Formula(), kind="role", **given)
    for model, more, says in (
        (Formula("other"), {}, "model.name was 'formula', is 'other'"),
        (Formula(), {"stored": "bfloat16"}, "settings.stored was 'float32', is 'bfloat16'"),
        (Formula(), {"kind": "trait"}, "settings.kind"),
        (Formula(), {"chat_template_kwargs": {"thinking": False}}, "settings.chat_template_kwargs"),
    ):
        if more.get("kind") == "trait":
            (tmp_path / "extract_scores/default.json").write_text("{}")
        with pytest.raises(RunDiffers, match=says):
            await read_answers(model, **{"kind": "role", **given, **more})
    (tmp_path / "extract_scores/default.json").unlink()
    for more, says in (({"kind": "rolle"}, "'role'"), ({"stored": "int8"}, "int8"), ({"names": ["bravo"]}, "'brave'")):
        with pytest.raises(UnknownName, match=says):
            await read_answers(Formula(), **{"kind": "role", **given, **more})
    with pytest.raises(InvalidRequest, match="concurrency=0"):
        await read_answers(Formula(), kind="role", concurrency=0, **given)
    with pytest.raises(InvalidRequest, match="the models differ"):
        await read_answers(Formula(), others=[Formula("other")], kind="role", **given)
    with locked(tmp_path / "out"), pytest.raises(InvalidRequest, match="another call writes to"):
        await read_answers(Formula(), kind="role", **given)
    with pytest.raises(InvalidFile, match="holds no answers"):
        await read_answers(Formula(), kind="role", **{**given, "responses": tmp_path})
    (tmp_path / "extract_scores/lonely.json").write_text("{}")
    with pytest.raises(InvalidFile, match=r"lonely\.json: scores without"):
        await read_answers(Formula(), kind="role", **given)
    await read_answers(Formula(), kind="role", names=["calm"], **given)
    (tmp_path / "extract_scores/lonely.json").unlink()
    with (tmp_path / "responses/calm.jsonl").open("a") as file:
        file.write(line(prompt=9, talk=[{"role": "assistant", "content": "z" * CONTEXT}]) + "\n")
    with pytest.raises(RunDiffers, match=r"calm\.jsonl has changed"):
        await read_answers(Formula(), kind="role", **given)
    with pytest.raises(InvalidPrompt, match=r"calm\.jsonl, line 25, pos_p9_q0: 122 tokens, .* room for 119"):
        await read_answers(Formula(), kind="role", **{**given, "to": tmp_path / "new"})


async def test_other_scores_make_other_levels_of_what_was_read(tmp_path) -> None:
    """Nothing is read again where scores or the minimum change, and files are those of a run with these from the start."""
    for place in ("a", "b"):
        written(tmp_path / place, "role")
    await read_answers(Formula(), kind="role", **asked(tmp_path / "a"))
    for place in ("a", "b"):
        (tmp_path / place / "extract_scores/calm.json").write_text('{"pos_p0_q1": 2, "pos_p0_q2": 2}')
    again = Formula()
    found = await read_answers(again, kind="role", **asked(tmp_path / "a", minimum=2))
    assert not again.read_prompts
    assert found.personas["calm"].levels == {"pos_2": 2, "pos_all": 2, "default_1": 12}
    assert found.personas["calm"].left_out["pos_2"] == {"not scored": 10}
    await read_answers(Formula(), kind="role", **asked(tmp_path / "b", minimum=2))
    assert digests(tmp_path / "a/out") == digests(tmp_path / "b/out")


async def test_scores_that_are_taken_back_have_their_own_levels(tmp_path, monkeypatch) -> None:
    """A call with other scores ends before any of its operations on files; the former scores give the former levels."""
    written(tmp_path, "role")
    path, other = tmp_path / "extract_scores/calm.json", '{"pos_p0_q1": 2, "pos_p0_q2": 2}'
    await read_answers(Formula(), kind="role", **asked(tmp_path))
    right, scores, left = digests(tmp_path / "out"), path.read_text(), [0]

    for name in ("replace", "unlink"):
        monkeypatch.setattr(Path, name, ending(left, getattr(Path, name)))
    for former in (scores, "{}"):  # "{}" has the level of default answers alone
        path.write_text(former)
        left[0] = 0
        await read_answers(Formula(), kind="role", **asked(tmp_path))
        right = digests(tmp_path / "out")
        for at in range(1, 9):
            path.write_text(other)
            left[0] = at
            with suppress(Killed):
                await read_answers(Formula(), kind="role", **asked(tmp_path))
            left[0] = 0
            path.write_text(former)
            await read_answers(Formula(), kind="role", **asked(tmp_path))
            assert digests(tmp_path / "out") == right, at


async def test_default_answers_of_earlier_calls_count(tmp_path) -> None:
    """A call that names one default file, or none, leaves the mean of all that were read."""
    talks = written(tmp_path, "role")
    file = tmp_path / "responses/default.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:5]) + "\n")
    (tmp_path / "responses/aside.jsonl").write_text("\n".join(lines[5:]) + "\n")
    await read_answers(Formula(), kind="role", **asked(tmp_path))
    right = digests(tmp_path / "out")
    for names in (["default"], ["aside"], ["calm"], ["aside", "wry"]):
        found = await read_answers(Formula(), kind="role", names=names, **asked(tmp_path))
        assert (found.default, digests(tmp_path / "out")) == (12, right), names
    new = {**asked(tmp_path), "to": tmp_path / "new"}
    assert (await read_answers(Formula(), kind="role", names=["calm"], **new)).default == 0
    assert (await read_answers(Formula(), kind="role", names=["default"], **new)).default == 5
    assert (await read_answers(Formula(), kind="role", names=["aside"], **new)).default == 12
    default = torch.load(tmp_path / "new/default_vectors.pt", weights_only=True)["activations"]["default_1"]
    mean = np.mean([mean_of(talk) for talk in talks["default"].values()], axis=0)
    np.testing.assert_allclose(default.numpy(), mean, rtol=2e-6, atol=1e-5)
    file.write_text("\n".join(lines[:4]) + "\n")
    with pytest.raises(RunDiffers, match=r"default\.jsonl has changed"):
        await read_answers(Formula(), kind="role", names=["aside"], **new)
    file.unlink()
    assert (await read_answers(Formula(), kind="role", names=["aside"], **new)).default == 7


async def test_a_role_without_levels_is_no_default_file(tmp_path) -> None:
    """A call that does not name it asks for neither its scores nor its answers of before."""
    written(tmp_path, "role")
    given: dict[str, Any] = {"kind": "role", **asked(tmp_path), "minimum": 1000}
    assert (await read_answers(Formula(), **given)).personas["calm"].levels == {"default_1": 12}
    file = tmp_path / "responses/calm.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / "extract_scores/calm.json").unlink()
    assert (await read_answers(Formula(), names=["wry"], **given)).default == 12


class Sized(Formula):
    """A model that is opened once, and may be too large."""

    log: ClassVar[list[str]] = []

    def __init__(self, dtype: str, too_large: set[str]) -> None:
        super().__init__(f"of {dtype}")
        self.dtype, self.too_large = dtype, too_large

    def check_memory(self) -> None:
        self.log.append(f"check {self.dtype}")
        if self.dtype in self.too_large:
            raise ModelTooLarge(f"{self.dtype} needs too much")

    async def __aenter__(self) -> Sized:
        self.log.append(f"start {self.dtype}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.log.append(f"stop {self.dtype}")


async def test_a_dtype_that_does_not_fit_is_refused_before_the_others_run(tmp_path, monkeypatch) -> None:
    """All are looked at before the first engine starts; one runs after another; each has folders of its own."""
    written(tmp_path, "role")
    monkeypatch.setattr(Sized, "log", [])
    found, refused = await read_answers_by_dtype(
        lambda dtype: Sized(dtype, {"float32"}), kind="role", **asked(tmp_path)
    )
    assert refused == {"float32": "float32 needs too much"}
    checks = [f"check {dtype}" for dtype in ("float32", "bfloat16", "float16")]
    assert Sized.log == [
        *checks,
        *(f"{what} {dtype}" for dtype in ("bfloat16", "float16") for what in ("start", "stop")),
    ]
    assert list(found) == ["bfloat16", "float16"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    for dtype in found:
        assert {
            f"vectors_vllm_{dtype}",
            f"response_activations_vllm_{dtype}",
            f"default_vectors_vllm_{dtype}.pt",
        } <= names
    assert not any("float32" in name for name in names)
    with pytest.raises(ModelTooLarge, match="float16 needs too much"):
        await read_answers_by_dtype(
            lambda dtype: Sized(dtype, {"float16"}), kind="role", dtypes=["float16"], **asked(tmp_path)
        )
    with pytest.raises(UnknownName, match="'float64'"):
        await read_answers_by_dtype(
            lambda dtype: Sized(dtype, set()), kind="role", dtypes=["float64"], **asked(tmp_path)
        )


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_memory_of_a_model_in_a_dtype(family, tmp_path, monkeypatch) -> None:
    """Weights by safetensors' own reading; what is free, and what is not known, on CPU and on GPUs."""
    from safetensors.torch import load_file

    path = tiny_checkpoint(family)
    tensors = [one for file in path.glob("*.safetensors") for one in load_file(file).values()]
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("torch.float16", 2)):
        assert weights_in(look_up(str(path)), dtype) == sum(one.numel() for one in tensors) * size
    assert weights_in(look_up(str(path)), "auto") == look_up(str(path)).bytes
    weights = sum(one.numel() for one in tensors) * 2
    more = (2 << 30) + 2 * (32 << 20)
    asked = {"dtype": "bfloat16", "tensor_parallel_size": 2, "kv_cache_memory_bytes": 32 << 20}
    monkeypatch.setattr(memory, "free_memory", lambda: weights + more)
    assert check_memory(str(path), asked).needed == weights + more
    with pytest.raises(ModelTooLarge, match="in dtype 'float32'"):
        check_memory(str(path), asked | {"dtype": "float32"})
    assert check_memory("no/such-model", asked).needed is None
    assert check_memory(str(path), asked | {"quantization": "fp8"}).needed is None
    twice = shutil.copytree(path, tmp_path / "twice")  # the same weights in Mistral's format, too, as an index tells
    shutil.copy(path / "model.safetensors", twice / "consolidated.safetensors")
    (twice / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}'
    )
    assert check_memory(str(twice), asked).weights == weights
    gpus = tuple(Gpu("G", 8 << 30, free, None, "", index) for index, free in enumerate((7 << 30, 2 << 30, None)))
    monkeypatch.setattr(memory, "built_for", lambda: "cuda")
    monkeypatch.setattr(memory, "gather_gpus", lambda: gpus)
    assert check_memory(str(path), {}, {"CUDA_VISIBLE_DEVICES": "0"}).available == 7 << 30
    with pytest.raises(ModelTooLarge, match="on one of its GPUs"):
        check_memory(str(path), asked, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert check_memory(str(path), {"cpu_offload_gb": 1}, {"CUDA_VISIBLE_DEVICES": "1"}).available == 3 << 30
    assert check_memory(str(path), {}, {"CUDA_VISIBLE_DEVICES": "2"}).available is None
    found = check_memory(str(path), asked | {"gpu_memory_utilization": 0.5}, {"CUDA_VISIBLE_DEVICES": "0"})
    assert found.available == math.floor((8 << 30) * 0.5)
    assert found.weights == weights // 2


def test_a_model_that_cannot_be_read_is_not_known(tmp_path, monkeypatch) -> None:
    """A pointer of Git LFS, or a header that is cut off; what vLLM refuses; what changes it, or parts it over machines."""
    monkeypatch.setattr(memory, "built_for", lambda: "cpu")
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    path = shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "model")
    changed = ({"limit_mm_per_prompt": {"image": 0}}, {"nnodes": 2})
    for more in (*changed, {"tensor_parallel_size": "four"}, {"kv_cache_memory_bytes": "1GiB"}):
        require_room(str(path), {"dtype": "float32", **more}, {})
    require_room(str(path), {"dtype": "float32"}, {"VLLM_CPU_KVCACHE_SPACE": "1.5"})
    with pytest.raises(ModelTooLarge):
        require_room(str(path), {"dtype": "float32"}, {})
    whole = (path / "model.safetensors").read_bytes()
    for content in (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        whole[:100],
        b"",
        whole[:8] + b"[]",
    ):
        (path / "model.safetensors").write_bytes(content)
        require_room(str(path), {"dtype": "float32"}, {})
        assert check_memory(str(path), {"dtype": "float32"}).needed is None


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_only_a_model_that_cannot_fit_is_refused_at_the_start(stored, tmp_path, monkeypatch) -> None:
    """Three quarters of the weights, in 16 bits where vLLM chooses the dtype, and caches of a fixed size must be free."""
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"dtype": stored}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: one.to(getattr(torch, stored)) for name, one in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    half = sum(one.numel() for one in tensors.values()) * 2
    monkeypatch.setattr(memory, "built_for", lambda: "cpu")
    for dtype, size in ((None, half), ("float32", 2 * half), ("float16", half)):
        asked = {"dtype": dtype, "kv_cache_memory_bytes": 5000}
        least = size - size // 4 + 5000
        monkeypatch.setattr(memory, "free_memory", lambda least=least: least)
        require_room(str(path), asked, {})
        monkeypatch.setattr(memory, "free_memory", lambda least=least: least - 1)
        with pytest.raises(ModelTooLarge, match=f"in dtype {dtype or 'auto'!r}"):
            require_room(str(path), asked, {})
        require_room(str(path), asked | {"hf_overrides": {"num_hidden_layers": 1}}, {})
        require_room(str(path), asked | {"distributed_executor_backend": "ray"}, {})
    gpus = (
        Gpu("H200", 1 << 40, half // 2, None, "", 0, "GPU-0"),
        Gpu("H200", 1 << 40, half // 2, None, "", 1, "GPU-1"),
    )
    monkeypatch.setattr(memory, "built_for", lambda: "cuda")
    monkeypatch.setattr(memory, "gather_gpus", lambda: gpus)
    monkeypatch.setattr(memory, "gather_processes", lambda: (GpuProcess("GPU-0", 77, "python", 129 * 10**9),))
    require_room(str(path), {"tensor_parallel_size": 2}, {})
    require_room(str(path), {"data_parallel_size": 2, "enable_expert_parallel": True}, {})
    for asked in ({}, {"data_parallel_size": 2}):
        with pytest.raises(
            ModelTooLarge, match=r"on one of its GPUs .*; process 77 \(python\) holds 129\.0 GB of GPU 0"
        ):
            require_room(str(path), asked, {})


def test_scores_are_checked_in_a_time_that_grows_with_their_number(tmp_path) -> None:
    """Of 2,000 keys each is looked at a few times, and not once for every other one."""
    looked = 0

    class Key(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looked
            looked += 1
            return super().__hash__()

    keys = [Key(f"pos_p0_q{number}") for number in range(2_000)]
    (tmp_path / "a.json").write_text(json.dumps({str(key): 3 for key in keys}))
    assert len(read_scores(tmp_path / "a.json", keys, tmp_path / "a.jsonl")) == 2_000
    assert looked < 4 * len(keys)
