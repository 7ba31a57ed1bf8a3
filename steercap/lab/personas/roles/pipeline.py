"""Pipeline from roles to their mean rows, in one call or by several processes that share the roles."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from steercap.core.display import brief
from steercap.core.extras import require
from steercap.core.protocols import Count, ProgressCallback
from steercap.errors import InvalidFile, RunUnfinished, TooFewKept
from steercap.lab.personas.capture import room_of
from steercap.lab.personas.pipeline import check
from steercap.lab.personas.records import RoleResponse
from steercap.lab.personas.roles.folder import RoleFolder, RolesFolder, open_folder, read_folder
from steercap.lab.personas.roles.role import ASSISTANT
from steercap.lab.personas.roles.rows import (
    LEAST,
    RoleRows,
    RoleRowsHeader,
    load_layer,
    read_rows_header,
    rows_path,
)
from steercap.lab.personas.roles.settings import RoleOutcome, RoleSettings, outcome_of, share_of
from steercap.lab.personas.roles.stages import answer, answers_of, kept_of, read, score
from steercap.steering.directions import Provenance

if TYPE_CHECKING:
    from steercap.model import SteerModel


@dataclass(frozen=True, eq=False)
class RoleRun:
    """Result of a run over roles.

    Args:
        rows: mean rows of the assistant and of each role with at least `min_kept` kept answers.
        outcomes: numbers of answers and scores of every role and the assistant, by name.
        settings: settings of the run.
        folder: folder of the run.
    """

    rows: RoleRows
    outcomes: Mapping[str, RoleOutcome]
    settings: RoleSettings
    folder: Path

    __repr__ = brief


async def run_roles(
    model: SteerModel, settings: RoleSettings, out: str | Path, *, progress: ProgressCallback | None = None
) -> RoleRun:
    """Generate a model's answers in many roles, and compute the mean rows of each role.

    The model answers every question under every system prompt of each role, and of the default assistant; answers are
    scored, if requested, and read again by the model; the rows of their tokens are averaged in the workers.

    Args:
        model: an open model, with taps at the site and layers of the settings, whose tokenizer has a chat template.
        settings: settings of the run.
        out: folder of the run. An interrupted run is resumed: written answers are not requested again. If only settings
            of later stages differ, these stages are repeated; roles may be added and dropped.
        progress: function called with a `Progress` whenever the work advances.

    Source: Lu et al. 2026, The Assistant Axis (arXiv:2601.10387).

    Raises:
        MissingExtra: the extra "personas" is not installed.
        RunDiffers: the folder has answers of another model or run; the message names the difference.
        InvalidFile: the folder is not that of a run over roles, or cannot be read.
        InvalidSetting: several samples at temperature 0, which would all be the same text; of a new run.
        PointNotArmed, LayerOutOfRange: there is no tap at a point to read; raised before anything is generated.
        TooFewKept: too few answers of the assistant, or of all roles but one.
        The errors of `SteerModel.run`, and of the scorer.
    """
    await run_roles_share(model, settings, out, progress=progress)
    return load_roles_run(out)


async def run_roles_share(
    model: SteerModel,
    settings: RoleSettings,
    out: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    progress: ProgressCallback | None = None,
) -> None:
    """Run all stages for a share of the roles, so that several processes, each with an engine, can share a folder.

    Args:
        model, settings, out, progress: arguments as for `run_roles`; the same for all shares.
        shard: (index of the share, from 0, number of shares n): role i is in share i mod n; role 0 is the assistant.

    Raises:
        InvalidSetting: there is no such share.
        The errors of `run_roles`, except TooFewKept.
    """
    require("personas")
    check(model, settings)
    names = share_of(settings, shard)
    folder = open_folder(out, model.identity(), settings)
    roles = [folder.roles[name] for name in names]
    await answer(model, settings, roles, progress)
    total = sum(settings.answers_of(name) for name in names)
    count = Count("read", total, 0, progress)
    for role in roles:
        await _finish(model, settings, role, count)


def load_roles_run(out: str | Path) -> RoleRun:
    """Load the result of a finished run, without a model.

    Args:
        out: folder of the run.

    Raises:
        RunUnfinished: a role is not done.
        InvalidFile: the folder is not that of a run over roles, or cannot be read.
        TooFewKept: too few answers of the assistant, or of all roles but one.
    """
    folder = read_folder(out)
    settings = folder.settings
    if missing := folder.missing:
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RunUnfinished(f"{out}: {len(missing)} of {len(folder.roles)} roles are not done: {named}; run it again")
    outcomes = {name: outcome for name, role in folder.roles.items() if (outcome := role.outcome) is not None}
    used = [name for name, outcome in outcomes.items() if not outcome.left_out]
    if ASSISTANT not in used or len(used) <= LEAST:
        told = "; ".join(f"{name}: {one.left_out}" for name, one in outcomes.items() if one.left_out)
        raise TooFewKept(f"{out} has rows of {used}; those of the assistant and of two roles are needed. {told}")
    return RoleRun(_rows(folder, settings, used), outcomes, settings, Path(out))


async def _finish(model: SteerModel, settings: RoleSettings, role: RoleFolder, count: Count) -> None:
    """Score and read the answers of a role, and mark it as done, with rows, or as left out if too few are kept.

    A finished role is read again if the model's context has room for other answers, or for more or fewer of their
    tokens, than when it was read.
    """
    responses = answers_of(role)
    scores = await score(settings, role, responses)
    kept = kept_of(settings, responses, scores)
    room = {response.id: len(response.token_ids) for response in kept}
    if not _is_read(role, room):  # not all were read to their ends; how many tokens fit takes long to find out
        room = room_of(model.tokenizer, model.max_model_len, settings, kept)
        kept = [response for response in kept if room[response.id]]
        room = {response.id: room[response.id] for response in kept}
    if _is_read(role, room):
        count.add(len(responses))
        return
    count.add(len(responses) - len(kept))
    why = _too_few(settings, responses, len(kept))
    role.begin("read")
    if why:
        rows_path(role).unlink(missing_ok=True)
        count.add(len(kept))
    else:
        await read(model, settings, role, kept, room=room, count=count)
    role.finish("read", outcome=outcome_of(responses, scores, len(kept), why, sum(room.values())))


def _is_read(role: RoleFolder, room: Mapping[str, int]) -> bool:
    """Return True if a role is finished with as many answers, and as many of their tokens, as `room` has.

    Equal sums are equal numbers of each: with the context, all grow or none.
    """
    outcome = role.outcome
    return outcome is not None and outcome.kept == len(room) and outcome.tokens in {None, sum(room.values())}


def _too_few(settings: RoleSettings, responses: Sequence[RoleResponse], kept: int) -> str:
    """Return the reason why a role has no vector, "" if it has one."""
    if kept >= settings.min_kept:
        return ""
    bound = "" if settings.scorer is None else f" at a score of {settings.threshold:g} or more"
    return f"kept {kept} of {len(responses)} answers{bound}; {settings.min_kept} are needed"


def _rows(folder: RolesFolder, settings: RoleSettings, used: list[str]) -> RoleRows:
    """Return the mean rows of the roles `used`; their files are opened on demand."""
    paths = {name: rows_path(folder.roles[name]) for name in used}
    headers = {name: read_rows_header(path) for name, path in paths.items()}
    number = len(settings.roles.questions[: settings.n_questions])
    layers = headers[ASSISTANT].layers
    if differing := [name for name, header in headers.items() if header.layers != layers]:
        raise InvalidFile(f"{paths[differing[0]]} holds layers {headers[differing[0]].layers}, others {layers}")
    model = folder.definition.model
    provenance = Provenance(
        revision=model["revision"],
        dtype=model["dtype"],
        prompts={
            name: hashlib.sha256("".join(header.prompts).encode()).hexdigest() for name, header in headers.items()
        },
        tokens="response",
        reduce="mean",
        method="mean",
        seed=settings.seed,
        rows={name: (sum(header.counts), 0) for name, header in headers.items()},
    )
    return RoleRows(
        {name: _spread(header, number) for name, header in headers.items()},
        layers,
        partial(_layer, paths, headers, number),
        model["name"],
        settings.site,
        provenance,
    )


def _layer(
    paths: Mapping[str, Path], headers: Mapping[str, RoleRowsHeader], number: int, name: str, layer: int
) -> torch.Tensor:
    """Read a role's rows at one layer: float32 [number, hidden], a row per question, 0 for one without answers."""
    found = load_layer(paths[name], headers[name], layer)
    rows = torch.zeros(number, found.shape[1])
    rows[list(headers[name].questions)] = found
    return rows


def _spread(header: RoleRowsHeader, number: int) -> tuple[int, ...]:
    known = dict(zip(header.questions, header.counts, strict=True))
    return tuple(known.get(question, 0) for question in range(number))
