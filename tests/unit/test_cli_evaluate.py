"""`steercap evaluate` before an engine starts: its file, what does not fit, what a folder of it is, its tables."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import msgspec
import pytest
from cli_calls import call, vectors

from steercap import Add, SteeringSpec
from steercap.cli.evaluate import report, sites_in
from steercap.cli.evaluation_file import EvaluationFile, read_evaluation
from steercap.cli.prompts import questions_of
from steercap.cli.terminal import Output, Terminal
from steercap.errors import InvalidFile, InvalidSpec
from steercap.lab.measures.texts import Length, Matches
from steercap.lab.studies.evaluation import EvaluationResults, Passages
from steercap.lab.studies.evaluation.store import Answer, Folder

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 8, "torch_dtype": "float32"}
YAML = """
methods:
  prompt: {system: Be warm.}
  praise: {file: praise.safetensors, layers: [1], doses: [1, 2], tokens: all}
  trained: {file: trained.safetensors}
  chance: {random: praise, count: 2}
questions: [one, [two, and then]]
measures: [length]
expressions: {greets: "^dear"}
tasks: [passages]
max_tokens: 8
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with what the file names, and a model of which only config.json is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    vectors(layers=[1, 2]).save(tmp_path / "praise.safetensors")
    SteeringSpec([Add(vectors(layers=[3])[3], layer=3, site="mlp_out")]).save(tmp_path / "trained.safetensors")
    (tmp_path / "evaluation.yaml").write_text(YAML)
    return tmp_path


def test_an_evaluation_is_what_its_file_and_flags_say(here) -> None:
    """Files from its own folder; random controls pooled; turns; expressions beside measures; flags come first."""
    (here / "below").mkdir()
    for name in ("evaluation.yaml", "praise.safetensors", "trained.safetensors"):
        (here / name).rename(here / "below" / name)
    settings = read_evaluation(Path("below/evaluation.yaml"), {"max_tokens": 3, "tasks": None})
    one = settings.evaluation()
    assert [(method.name, method.doses) for method in one.methods] == [
        ("none", (1.0,)),
        ("prompt", (1.0,)),
        ("praise", (1.0, 2.0)),
        ("trained", (1.0,)),
        ("random, as praise 00", (1.0, 2.0)),
        ("random, as praise 01", (1.0, 2.0)),
    ]
    assert one.questions == (("one",), ("two", "and then"))
    assert one.sampling_params == {"max_tokens": 3, "temperature": 0.0}
    (edit,) = one.method("praise").spec(2).flat()
    assert (edit.layer, edit.scale, str(edit.selection)) == (1, 2, "'all'")
    assert settings.all_measures() == ["length", Matches("greets", "^dear")]
    assert sites_in(one) == ("resid_post", "mlp_out")
    assert read_evaluation(Path("below/evaluation.yaml"), {"concurrency": 2}).concurrency == 2


def test_questions_may_be_lines_of_a_file(here) -> None:
    """Or conversations in JSON of which the user's part alone is given."""
    (here / "q.jsonl").write_text(
        '"one"\n{"messages": [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]}\n'
    )
    settings = EvaluationFile(methods={}, questions=str(here / "q.jsonl"))
    with pytest.raises(InvalidSpec, match="at least one"):
        settings.evaluation()
    assert questions_of(settings.questions) == ["one", ["two", "three"]]
    (here / "q.jsonl").write_text('{"messages": [{"role": "assistant", "content": "two"}]}\n')
    with pytest.raises(InvalidFile, match="a question of several turns must hold only the"):
        questions_of(settings.questions)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("methods:", "ways:", "unknown field `ways`"),
        ("system: Be warm.", "system: 3", "Expected `str`"),
        ("random: praise", "random: blame", "random control of the unknown method 'blame'"),
        ("layers: [1]", "layers: [3]", r"it has them for layers \[1, 2\]"),
        ("praise.safetensors", "nothing.safetensors", "nothing.safetensors"),
        ("{file: trained.safetensors}", "{file: trained.safetensors, layers: [1]}", "edits have their own"),
        ("tasks: [passages]", "tasks: [chess]", "unknown task 'chess'"),
        ("measures: [length]", "measures: [warmth]", "unknown measure 'warmth'"),
        ("measures: [length]", "measures: [matches]", "needs its name and pattern"),
        ('"^dear"', '"("', "is not a regular expression"),
        ("  prompt:", "  praise:", r"has 'praise' \(line 4\) twice in one mapping"),
        ("tokens: all}", "tokens: all, doses: [3]}", r"has 'doses' \(line 4\) twice in one mapping"),
        ("count: 2", "count: 0", "Expected `int` >= 1"),
        ("random: praise", "random: praise, doses: [9]", "method 'chance': doses would change nothing beside `random`"),
        ("random: praise", "random: praise, layers: [3], file: gone.gguf", "file, layers would change nothing beside"),
        ("system: Be warm.", "system: Be warm., count: 3", "method 'prompt': count would change nothing without"),
        (
            "system: Be warm.",
            "system: Be warm., first_row: 1",
            "method 'prompt': first_row would change nothing without",
        ),
        ("tasks: [passages]", "tasks: [passages]\nby: nuetral", "by='nuetral' is no measure or task"),
        ("tasks: [passages]", "tasks: [passages]\nby: nuetral\nat: 5", "by='nuetral' is no measure or task"),
    ],
)
def test_what_does_not_fit_is_an_error_at_once(old, new, says, here) -> None:
    """In a line, with exit code 1, before an engine starts."""
    (here / "evaluation.yaml").write_text(YAML.replace(old, new))
    done = call("evaluate", "evaluation.yaml", "--out", "x", "-m", "model")
    assert done.exit_code == 1, done.output

    assert re.search(says, " ".join(done.stderr.split())), done.stderr


def test_vectors_of_another_model_are_an_error_at_once(here) -> None:
    """By their width, as config.json says it."""
    vectors(layers=[1, 2], width=16).save(here / "praise.safetensors")
    (here / "evaluation.yaml").write_text(YAML.replace("  trained: {file: trained.safetensors}\n", ""))
    done = call("evaluate", "evaluation.yaml", "--out", "x", "-m", "model")
    assert (done.exit_code, "width 16" in done.stderr) == (1, True), done.output


def test_a_folder_of_other_questions_is_refused_and_one_of_further_methods_is_not(here) -> None:
    """What differs is known from the folder; `steercap inspect` says what it holds."""
    settings = read_evaluation(Path("evaluation.yaml"), {})
    Folder(here / "x", settings.evaluation(), {"name": "m"})
    (here / "evaluation.yaml").write_text(YAML.replace("one,", "other,"))
    done = call("evaluate", "evaluation.yaml", "--out", "x", "-m", "model")
    assert (done.exit_code, "RunDiffers" in done.stderr) == (1, True), done.output
    found = json.loads(call("inspect", "x", "--json").stdout)
    assert (found["kind"], found["answers"], found["asked"], found["turns"]) == ("evaluation", 0, 9 * 3, 2)
    assert found["methods"].startswith("none at 1, prompt at 1, praise at 1 2")
    assert call("inspect", "x").exit_code == 0


def results(here: Path) -> tuple[EvaluationResults, EvaluationFile]:
    settings = read_evaluation(here / "evaluation.yaml", {})
    one = settings.evaluation()
    answers = [
        Answer(
            number=at,
            method=condition.method,
            dose=condition.dose,
            question=question,
            sample=0,
            turn=turn,
            finish_reason="stop",
            prompt="p",
            prompt_token_ids=(1,),
            text="t",
            output_token_ids=(2, 3),
        )
        for at, condition in enumerate(one.conditions())
        for question, turns in enumerate(one.questions)
        for turn in range(len(turns))
    ]
    lengths = [10 * one.question + one.dose for one in answers]
    neutral = {condition: [2.0 + condition.dose, 3.0 + condition.dose] for condition in one.conditions()}
    for condition in neutral:
        if condition.method in {"none", "prompt"}:
            neutral[condition] = [2.0, 3.0]
    measures, tasks = {"length": Length()}, {"neutral": Passages(first=2)}
    return EvaluationResults(one, answers, {"length": lengths}, {"neutral": neutral}, measures, tasks), settings


def test_results_are_shown_written_and_drawn(here, capsys) -> None:
    """Two tables, of every dose and at one cost; files in the folder; as JSON without NaN."""
    (here / "x").mkdir()
    found, settings = results(here)
    report(found, settings, here / "x", Terminal(Output()), plot=True)
    shown = capsys.readouterr().out
    assert "every dose" in shown
    assert "at neutral" in shown
    assert "as it is" in shown
    assert {path.name for path in (here / "x").iterdir()} == {"methods.md", "methods.parquet", "methods.png"}
    report(found, settings, here / "x", Terminal(Output(json=True)), plot=False)
    document = json.loads(capsys.readouterr().out)
    assert document["matched"]["by"] == "neutral"
    assert len(document["summary"]) == len({(line.method, line.dose) for line in found.summary()})
    assert {line["how"] for line in document["matched"]["methods"]} == {"interpolated", "as it is"}


def test_a_picture_is_drawn_at_the_cost_of_the_file(here, capsys) -> None:
    """Also where no method costs more than no steering, so that there is no cost that all reach."""
    (here / "x").mkdir()
    found, settings = results(here)
    free = dataclasses.replace(found, readings={"neutral": {key: [2.0, 3.0] for key in found.readings["neutral"]}})
    report(free, msgspec.structs.replace(settings, at=9.0), here / "x", Terminal(Output()), plot=True)
    assert "at neutral" in capsys.readouterr().out
    assert (here / "x" / "methods.png").stat().st_size > 10_000


@pytest.mark.usefixtures("here")
def test_options_that_do_not_fit_are_called_wrongly() -> None:
    """Exit code 2, as for every command."""
    for flags in (["--temperature", "nan"], ["--max-tokens", "0"], ["--tasks", ","]):
        assert call("evaluate", "evaluation.yaml", "--out", "x", "-m", "model", *flags).exit_code == 2
