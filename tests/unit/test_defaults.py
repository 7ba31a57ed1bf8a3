"""The command line has the defaults of the functions that its commands call, so that both give one result."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import pytest
import typer

from steercap.captures.recordings import RecordLimits
from steercap.cli.app import app
from steercap.cli.engines import ReachOptions
from steercap.cli.evaluation_file import EvaluationFile, MethodFile, RolloutFile
from steercap.cli.parsing import tokens_of
from steercap.cli.sweep_file import SweepFile
from steercap.cli.terminal import Output
from steercap.core.spec import CaptureSpec
from steercap.core.tokens import TokenSelection
from steercap.lab.datasets.collecting import RayActors, collect, open_source
from steercap.lab.directions import extract
from steercap.lab.mechanism.analysis import anatomy
from steercap.lab.mechanism.codec_check import check_codecs
from steercap.lab.mechanism.comparison import CompareSettings
from steercap.lab.personas import PersonaSettings, read_answers
from steercap.lab.personas.roles import RoleSettings, assistant_axis, calibrated_capping, stability
from steercap.lab.studies import SAMPLING, rollout_methods, run_rollouts, try_layers
from steercap.lab.studies.evaluation import Evaluation, Method, evaluate
from steercap.lab.studies.sweeps import Sweep, run_sweep
from steercap.lab.training import (
    SAETraining,
    TokenBudget,
    TrainableAdd,
    TrainableLowRank,
    train,
    train_datasets,
)
from steercap.lab.training.settings import TrainingSettings
from steercap.server.record_settings import RecordSettings
from steercap.server.server import ServerSettings

#: Options of every command: of its model, of output, and where the result goes.
SHARED = {one.name for kind in (ReachOptions, Output) for one in dataclasses.fields(kind)}
SHARED |= {"out", "force", "plot", "help"}
#: What each command passes its options to: functions, classes, and mappings by name.
FORWARDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "analyse": (anatomy,),
    "capture": (CaptureSpec, SAMPLING),
    "codecs check": (check_codecs,),
    "collect": (collect, CaptureSpec, open_source, RayActors),
    "compare": (CompareSettings,),
    "evaluate": (Evaluation, evaluate, SAMPLING),
    "generate": (SAMPLING,),
    "persona answers": (read_answers,),
    "persona axis": (assistant_axis, stability),
    "persona cap": (calibrated_capping, assistant_axis),
    "persona roles": (RoleSettings,),
    "persona run": (PersonaSettings,),
    "rollouts": (Evaluation, run_rollouts, SAMPLING),
    "sae train": (SAETraining,),
    "serve": (ServerSettings, RecordSettings, RecordLimits),
    "sweep": (Sweep, run_sweep, SAMPLING),
    "train": (TrainingSettings, train, train_datasets, TrainableAdd, TrainableLowRank, TokenBudget),
    "up": (ServerSettings,),
    "vectors extract": (extract, try_layers),
}
#: The same of the keys of YAML files.
FILES: Final[Mapping[Any, tuple[Any, ...]]] = {
    SweepFile: (Sweep, run_sweep),
    EvaluationFile: (Evaluation, evaluate),
    RolloutFile: (Evaluation, run_rollouts, rollout_methods),
    MethodFile: (Method, Method.random),
}
#: Parameters of options with another name, and the factor on the option's number.
NAMED: Final = {
    "record_full": ("when_full", 1),
    "record_gib": ("most_bytes", 2**30),
    "ray_cpus": ("num_cpus", 1),
    "ray_gpus": ("num_gpus", 1),
    "ray_restarts": ("max_restarts", 1),
    "ray_retries": ("max_task_retries", 1),
    "rows": ("most_rows", 1),
    "shard_mib": ("shard_bytes", 2**20),
    "training_tokens": ("training", 1),
    "validation_tokens": ("validation", 1),
    **{
        f"{what}_gib{whose}": (f"{what}_bytes{whose}", 2**30)
        for what in ("unfetched", "folder")
        for whose in ("", "_of_a_key")
    },
}
#: Defaults that differ deliberately, and those that no parameter has, by command or kind of file.
OWN: Final[Mapping[Any, str]] = {
    "sweep": "measures",  # a command shows a table of them; in Python a later call adds any, and `read_results` names them
    "evaluate": "measures",
    SweepFile: "measures",
    EvaluationFile: "measures",
    RolloutFile: "level",  # of files
    "generate": "samples",  # n of vLLM; its max_tokens and temperature are those of studies, in Python they are vLLM's
    "capture": "samples",
    "persona roles": "shard",  # of one process
    "sae train": "skip batch_size",  # the rows that it reads, of which `SAETraining` knows nothing
    "train": "edit",  # the name of a kind, which in Python is an object
    "serve": "host port sites",  # of the server's process; `SteerModel` has its sites by the environment
    "up": "sites",
}


def commands(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, one in getattr(found, "commands", {}).items():
        yield from commands(one, (*path, name))
    if not hasattr(found, "commands"):
        yield " ".join(path), found


COMMANDS: Final = dict(commands(typer.main.get_command(app)))


def defaults(to: Any) -> dict[str, Any]:
    """Return the default of every parameter that has one, by name."""
    if isinstance(to, Mapping):
        return dict(to)
    if isinstance(to, type) and issubclass(to, msgspec.Struct):
        given = {one.name: one.default for one in msgspec.structs.fields(to)}
    else:
        given = {name: one.default for name, one in inspect.signature(to).parameters.items()}
    return {
        name: value for name, value in given.items() if value not in (None, inspect.Parameter.empty, msgspec.NODEFAULT)
    }


def same(given: Any, default: Any) -> bool:
    """Return whether an option's value, or its words in a help, means the default of a parameter."""
    if isinstance(default, slice):
        return TokenSelection.parse(tokens_of(given)) == TokenSelection.parse(default)
    if isinstance(given, str) and not isinstance(default, str):
        parts = default if isinstance(default, (list, tuple)) else [default]
        return re.split(r",\s*", given) == [
            f"{one:.10g}" if isinstance(one, (int, float)) else str(one) for one in parts
        ]
    return bool(given == default)


def own(name: str, kind: Any) -> bool:
    return name in OWN.get(kind, "").split()


def known(to: tuple[Any, ...]) -> dict[str, Any]:
    """Return the defaults of several, the first of which counts."""
    found: dict[str, Any] = {}
    for one in reversed(to):
        found |= defaults(one)
    return found


@pytest.mark.parametrize("name", FORWARDS)
def test_options_have_the_defaults_of_what_they_are_passed_to(name) -> None:
    """Values, and words in the help of an option that is passed on only where it is given."""
    there = known(FORWARDS[name])
    for option in COMMANDS[name].params:
        if option.name in SHARED or own(option.name, name):
            continue
        parameter, factor = NAMED.get(option.name, (option.name.removeprefix("record_"), 1))
        said = re.search(r"\(default:? ([^;:)]+)", option.help or "")
        if option.default not in (None, False):
            assert parameter in there, f"{option.name}: pass it to a parameter of this name, or name that in NAMED"
            value = option.default
            assert same(value if factor == 1 else value * factor, there[parameter]), option.name
        elif said and parameter in there and not callable(there[parameter]):
            assert same(said[1], there[parameter]), option.name


@pytest.mark.parametrize("file", FILES, ids=lambda kind: kind.__name__)
def test_keys_of_files_have_the_defaults_of_what_they_are_passed_to(file) -> None:
    there = known(FILES[file])
    for name, default in defaults(file).items():
        assert not default or own(name, file) or same(default, there[name]), name


def test_every_command_with_defaults_is_compared() -> None:
    """But those that print or convert what there is, and those whose options have no defaults."""
    alone = {"demo", "doctor", "down", "explore", "inspect", "models", "smoke", "status"}
    alone |= {"persona levels", "persona traits", "vectors compare", "vectors convert", "vectors show"}
    assert COMMANDS.keys() - FORWARDS.keys() == alone
