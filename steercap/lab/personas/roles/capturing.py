"""Stage "read": one row per question and layer, the mean over a role's kept answers of each answer's mean row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from steercap.concurrency.bounded import each_of
from steercap.files.base import write_tensors
from steercap.lab.directions import Exchange, mean_rows
from steercap.lab.personas.progress import Count
from steercap.lab.personas.records import RoleResponse
from steercap.lab.personas.roles.folder import RoleFolder
from steercap.lab.personas.roles.rows_file import VERSION, RoleRowsHeader, load_part, rows_path
from steercap.lab.personas.roles.settings import RoleSettings
from steercap.lab.personas.stages.capture import prompt_of, room_of

if TYPE_CHECKING:
    from steercap.model import SteerModel


async def read(
    model: SteerModel, settings: RoleSettings, role: RoleFolder, kept: Sequence[RoleResponse], count: Count
) -> None:
    """Read a role's kept answers with the model, and write `rows.safetensors`.

    Each answer becomes one row per layer in the workers, and the answers to a question become one here, before the next
    are read: memory does not grow with the number of answers.

    Args:
        model: an open model.
        settings: settings of the run.
        role: folder of the role.
        kept: kept answers in the order of the table, each of which fits the context.
        count: counter of answers.

    Raises:
        The errors of `SteerModel.read`.
    """
    place, room = role.parts("read"), room_in(model, settings, kept)

    async def one(batch: Sequence[RoleResponse]) -> None:
        path = place / f"{batch[0].question:06}.safetensors"
        if not path.exists():
            write_tensors(path, *await _means(model, settings, batch, room))
        count.add(len(batch))

    at_once = 1 if settings.read_together == 1 else 2  # one by one, nothing else may be in the batch
    await each_of(_batches(settings, kept), one, at_once)
    found = [load_part(path) for path in sorted(place.glob("*.safetensors"))]
    headers = [header for header, _, _ in found]
    whole = RoleRowsHeader(
        VERSION,
        role.name,
        headers[0].layers,
        tuple(question for header in headers for question in header.questions),
        tuple(number for header in headers for number in header.counts),
        tuple(digest for header in headers for digest in header.prompts),
    )
    tensors = {
        "means": torch.cat([means for _, means, _ in found], 1),
        "norms": torch.cat([norms for _, _, norms in found], 1),
    }
    write_tensors(rows_path(role), whole, tensors)


def room_in(model: SteerModel, settings: RoleSettings, responses: Sequence[RoleResponse]) -> dict[str, int]:
    """Return the number of tokens of each answer that can be read after its prompt, by id; 0 for none."""
    return room_of(model.tokenizer, model.max_model_len, settings, responses)


def _batches(settings: RoleSettings, kept: Sequence[RoleResponse]) -> Iterator[list[RoleResponse]]:
    """Yield answers to whole questions, at least `read_together` at once, regardless of what was read before."""
    ordered = sorted(kept, key=lambda response: response.question)  # stable: by prompt and sample within a question
    batch: list[RoleResponse] = []
    for _, answers in groupby(ordered, key=lambda response: response.question):
        batch += answers
        if len(batch) >= settings.read_together:
            yield batch
            batch = []
    if batch:
        yield batch


async def _means(
    model: SteerModel, settings: RoleSettings, batch: Sequence[RoleResponse], room: Mapping[str, int]
) -> tuple[RoleRowsHeader, dict[str, torch.Tensor]]:
    """Return the rows of some questions, with their header."""
    exchanges = [Exchange(prompt_of(settings, one), one.token_ids[: room[one.id]]) for one in batch]
    pieces = [exchanges[at : at + settings.read_together] for at in range(0, len(exchanges), settings.read_together)]
    read = [await mean_rows(model, piece, layers=settings.layers, site=settings.site) for piece in pieces]
    rows = torch.cat([one.values for one in read]).double()
    prompts = [digest for one in read for digest in one.prompts]
    places: dict[int, list[int]] = {}
    for place, one in enumerate(batch):
        places.setdefault(one.question, []).append(place)
    header = RoleRowsHeader(
        VERSION,
        batch[0].role,
        read[0].layers,
        tuple(places),
        tuple(map(len, places.values())),
        tuple(_digest(prompts, mine) for mine in places.values()),
    )
    means = torch.stack([rows[mine].mean(0) for mine in places.values()], 1)
    norms = torch.stack([rows[mine].norm(dim=-1).mean(0) for mine in places.values()], 1)
    return header, {"means": means.float().contiguous(), "norms": norms.float().contiguous()}


def _digest(prompts: Sequence[bytes], places: Sequence[int]) -> str:
    return hashlib.sha256(b"".join(prompts[place] for place in places)).hexdigest()
