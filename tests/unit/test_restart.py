"""What an engine that is started again needs of everything else: a setting, a word in receipts, and no server."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handles import a_handle

from steercap import CaptureHandle, SteerModel
from steercap.cli.engines import ModelOptions
from steercap.errors import InvalidSetting
from steercap.server.server import ServerSettings, application


@pytest.mark.parametrize("value", [1, "yes", 0, "false"])
def test_it_is_asked_for_by_true_alone(value) -> None:
    """Nothing else means it, as 1 might mean one restart."""
    with pytest.raises(InvalidSetting, match="give True or False"):
        SteerModel("m", restart=value)


def test_a_command_asks_for_it_by_its_flag() -> None:
    """And leaves it to the environment without."""
    assert ModelOptions(restart=True).arguments()["restart"] is True
    assert "--restart" in ModelOptions(restart=True).flags()
    assert "restart" not in ModelOptions().arguments()


async def test_a_server_refuses_it() -> None:
    """It ends with its engine."""
    with pytest.raises(InvalidSetting, match="ends with its engine"):
        await application(SteerModel("m", restart=True), None, ServerSettings())


def test_rows_that_were_computed_again_say_so_in_their_file(tmp_path) -> None:
    """Whoever loads them can know."""
    handle = a_handle()
    assert not CaptureHandle.load(handle.save(tmp_path / "a.safetensors")).receipt.recomputed
    found = handle.lifecycle.found
    handle.lifecycle.found = found._replace(receipt=replace(found.receipt, recomputed=True))
    assert CaptureHandle.load(handle.save(tmp_path / "b.safetensors")).receipt.recomputed
