"""Roles on an engine: what a run writes down, that neither a kill nor several processes change a bit of it, and capping."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from conftest import opened
from preloaded import killed
from roles_run import ROLES, SETTINGS, checkpoint
from support.rows import TINY_ENGINE

from steercap import Progress, SteeringSpec, SteerModel
from steercap.errors import RunDiffers, RunUnfinished
from steercap.files.tables import read_table
from steercap.lab.directions import Exchange, mean_rows
from steercap.lab.personas.capture import prompt_of
from steercap.lab.personas.records import RoleResponse
from steercap.lab.personas.roles import (
    ASSISTANT,
    RoleRun,
    assistant_axis,
    calibrated_capping,
    calibration_texts,
    cases_of,
    changes,
    compare_steering,
    drift_cases,
    load_roles_run,
    run_roles,
    run_roles_share,
    token_projections,
)

SCRIPT = Path(__file__).parents[1] / "roles_run.py"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
async def model(path) -> AsyncIterator[SteerModel]:
    async with opened(path, **TINY_ENGINE) as found:
        yield found


@pytest.fixture(scope="module")
async def whole(model, tmp_path_factory) -> RoleRun:
    """A run that nothing interrupts."""
    return await run_roles(model, SETTINGS, tmp_path_factory.mktemp("whole"))


def answers(folder: Path, name: str) -> list[RoleResponse]:
    return read_table(folder / "roles" / name / "answers.parquet", RoleResponse)


def assert_same(ours: RoleRun, theirs: RoleRun) -> None:
    """Every answer, every row and the axis, to the last bit."""
    assert ours.outcomes == theirs.outcomes
    for name in (ASSISTANT, *ROLES.names):
        assert answers(ours.folder, name) == answers(theirs.folder, name)
        assert ours.rows.counts[name] == theirs.rows.counts[name]
        for layer in ours.rows.layers:
            assert torch.equal(ours.rows.at(name, layer), theirs.rows.at(name, layer)), (name, layer)
    assert ours.rows.vectors() == theirs.rows.vectors()
    assert assistant_axis(ours.rows).vectors == assistant_axis(theirs.rows).vectors


async def test_a_row_is_the_mean_over_what_the_model_reads(model, whole) -> None:
    """Of each question the mean over its kept answers, with the system prompt before them, where there is one."""
    found = [one for one in answers(whole.folder, "ghost") if one.question == 3 and one.token_ids]
    assert {one.system_prompt for one in found} == {"be a ghost", "you are a ghost"}
    read = await mean_rows(model, [Exchange(prompt_of(SETTINGS, one), one.token_ids) for one in found])
    for place, layer in enumerate(whole.rows.layers):
        wanted = read.values[:, place].double().mean(0)
        got = whole.rows.at("ghost", layer)[3]
        assert float((got - wanted).norm()) < 1e-5 * float(wanted.norm())
    assert answers(whole.folder, ASSISTANT)[0].system_prompt == ""  # the first of its prompts is none


async def test_a_killed_run_goes_on_and_is_the_same_to_the_last_bit(model, path, whole, tmp_path) -> None:
    """What was written down before the kill is not asked again, in either stage."""
    killed(SCRIPT, path, tmp_path, "generate", 45)
    written = {one.id for file in tmp_path.rglob("*.parquet") for one in read_table(file, RoleResponse)}
    assert 10 < len(written) < 72
    reports: list[Progress] = []

    class Interrupted(Exception):
        pass

    def interrupt(report: Progress) -> None:
        reports.append(report)
        if report.stage == "read" and report.done >= 40:
            raise Interrupted

    with pytest.raises(Interrupted):
        await run_roles(model, SETTINGS, tmp_path, progress=interrupt)
    assert max(one.done for one in reports if one.stage == "generate") == 72
    asked = [one.done for one in reports if one.stage == "generate"]
    assert len(set(asked)) <= 72 - len(written) + len(ROLES.names) + 2  # what was there is counted role by role
    parts = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("rows.safetensors")}
    assert 0 < len(parts) < 6
    with pytest.raises(RunUnfinished, match="are not done: "):
        load_roles_run(tmp_path)
    resumed = await run_roles(model, SETTINGS, tmp_path)
    assert all(file.stat().st_mtime_ns == then for file, then in parts.items())
    assert not list(tmp_path.rglob("parts/*"))
    assert_same(resumed, whole)


async def test_shares_of_a_run_are_the_whole(model, whole, tmp_path) -> None:
    """Each role is of one share; two of them in one folder give what one process gives, to the last bit."""
    await run_roles_share(model, SETTINGS, tmp_path, shard=(1, 2))
    with pytest.raises(RunUnfinished, match=r"3 of 6 roles are not done: assistant, poet, king"):
        load_roles_run(tmp_path)
    await run_roles_share(model, SETTINGS, tmp_path, shard=(0, 2))
    assert_same(load_roles_run(tmp_path), whole)


async def test_later_settings_do_later_stages_again_and_others_are_refused(model, whole, tmp_path) -> None:
    """Other layers read the same answers; roles come and go; another seed is another run, and nothing is changed."""
    first = msgspec.structs.replace(SETTINGS, roles=ROLES.select(["pirate", "poet"]))
    await run_roles(model, first, tmp_path)
    reports: list[Progress] = []
    fewer = msgspec.structs.replace(SETTINGS, layers=(1, 2), roles=ROLES.select(["ghost", "poet"]))
    found = await run_roles(model, fewer, tmp_path, progress=reports.append)
    assert next(one for one in reports if one.stage == "generate").done == 24  # the assistant's and the poet's
    assert (found.rows.layers, found.rows.names) == ((1, 2), ("ghost", "poet"))
    assert torch.equal(found.rows.at("ghost", 2), whole.rows.at("ghost", 2))
    with pytest.raises(RunDiffers, match="seed was 0, is 1"):
        await run_roles(model, msgspec.structs.replace(fewer, seed=1), tmp_path)
    assert load_roles_run(tmp_path).rows.names == ("ghost", "poet")


async def test_capping_holds_rows_above_the_floor(model, whole, tmp_path) -> None:
    """Floors are percentiles of the assistant's tokens; capped, no token's projection lies below, in the file's spec too."""
    axis = assistant_axis(whole.rows)
    made = await calibrated_capping(model, whole, axis, layers=[1, 2], percentile=40)
    rows = await model.read(
        [{"prompt_token_ids": [*_prompt(model, one), *one.response]} for one in calibration_texts(whole)],
        capture_layers=[1, 2],
        steering=None,
    )
    await model.fetch_captures_batch(rows)
    for layer in (1, 2):
        unit = (axis.vectors[layer] / axis.vectors[layer].norm()).double()
        tokens = [
            handle.captures[layer][len(_prompt(model, one)) :].double() @ unit
            for handle, one in zip(rows, calibration_texts(whole), strict=True)
        ]
        wanted = np.percentile(torch.cat(tokens).numpy(), 40)
        assert made.floors[layer] == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    spec = SteeringSpec.load(made.save(tmp_path / "cap.safetensors"))
    cases = [*cases_of(SETTINGS)[:6], *drift_cases(["who are you?"])]
    records = await compare_steering(model, axis, {"capped": spec}, cases, SETTINGS, layers=[1, 2], scorer=None)
    capped = [one for one in records if one.condition == "capped"]
    assert len(capped) == 7
    assert all(one.projection[layer] >= made.floors[layer] - 1e-3 for one in capped for layer in (1, 2))
    plain = [one for one in records if one.condition == "plain"]
    assert any(one.projection[2] < made.floors[2] for one in plain)
    assert [one.answer for one in plain[:6]] == [one.answer for one in answers(whole.folder, "pirate")[:6]]
    first = answers(whole.folder, "pirate")[0]
    again = await token_projections(model, axis, [Exchange(prompt_of(SETTINGS, first), first.token_ids)], layers=[1])
    assert plain[0].read[1] == pytest.approx(float(again[1].double().mean()), rel=1e-4, abs=1e-4)
    assert {one.measure for one in changes(records, 2)} == {"projection", "projection read", "tokens", "perplexity"}


async def test_a_run_of_another_model_is_not_calibrated_on(model, whole) -> None:
    """The folder says which model it is of."""
    settings = whole.folder / "settings.json"
    said = settings.read_bytes()
    try:
        settings.write_bytes(said.replace(b'"name": "tiny"', b'"name": "other"'))
        with pytest.raises(RunDiffers, match="name was 'other', is 'tiny'"):
            await calibrated_capping(model, whole, assistant_axis(whole.rows), layers=[1])
    finally:
        settings.write_bytes(said)


def _prompt(model: SteerModel, one: Exchange) -> list[int]:
    return model.tokenizer.apply_chat_template(one.prompt, add_generation_prompt=True, return_dict=False)
