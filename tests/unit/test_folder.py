"""The folder that a server writes rows to: numbered files, a manifest that lists what is whole, and limits."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from full_disk import files_of_at_most
from handles import a_handle

from steercap import CaptureHandle
from steercap.captures import saving
from steercap.captures.manifest import Manifest
from steercap.errors import CaptureMemoryFull, InvalidRequest, RunDiffers, ServerFailure
from steercap.server.folder import CaptureFolder
from steercap.server.server import ServerSettings, opened_folder

ME, OTHER = "me", "other"


def listed(path) -> list[str]:
    """What the manifest of a folder lists; each is whole, and nothing else is there."""
    manifest = Manifest.load(path)
    assert not [one.file for one in manifest.requests if manifest.wrong(one)]
    found = [one.file for one in manifest.requests]
    assert {one.name for one in path.iterdir()} - {"manifest.json", "manifest.journal"} == set(found)
    return found


async def test_files_have_numbers_and_are_listed_at_once(tmp_path) -> None:
    """While the server runs, when it has ended, and by the next one."""
    path, handle = tmp_path / "rows", a_handle()
    with CaptureFolder(path, model="m") as folder:
        one, two = await folder.write([handle, a_handle(prompt=(5,))], ME)
        assert [one.file, two.file] == listed(path) == ["000000.safetensors", "000001.safetensors"]
        assert one.bytes == (path / one.file).stat().st_size
        assert folder.written(ME) == one.bytes + two.bytes
        assert folder.written(OTHER) == 0
        with pytest.raises(InvalidRequest, match="another process writes to"):
            CaptureFolder(path, model="m")
    assert torch.equal(CaptureHandle.load(path / one.file).captures[1], handle.captures[1])
    with opened_folder("m", ServerSettings(folder=path)) as again:
        assert [found.file for found in await again.write([handle], OTHER)] == ["000002.safetensors"]
    assert len(listed(path)) == 3
    with pytest.raises(RunDiffers, match="model"):
        CaptureFolder(path, model="another")
    with opened_folder("m", ServerSettings()) as nothing:
        assert nothing is None


async def test_limits_are_of_each_key_and_of_all(tmp_path) -> None:
    """What would go beyond one is not written; what was there before counts for all."""
    handle = a_handle()
    with CaptureFolder(tmp_path, model="m") as folder:
        (first,) = await folder.write([handle], ME)
    with CaptureFolder(tmp_path, model="m", most_of_a_key=2 * first.bytes, most_bytes=4 * first.bytes) as folder:
        await folder.write([handle, handle], ME)
        with pytest.raises(CaptureMemoryFull, match="your requests have written"):
            await folder.write([handle], ME)
        with pytest.raises(CaptureMemoryFull, match="your requests have written"):
            folder.require_room(ME)
        folder.require_room(OTHER)
        await folder.write([handle], OTHER)
        with pytest.raises(CaptureMemoryFull, match="this server's folder holds"):
            folder.require_room("a third")
    assert len(listed(tmp_path)) == 4


async def test_a_full_disk_leaves_no_half_file(tmp_path) -> None:
    """Neither the file nor its entry is there, no path is said, and what fits is written afterwards."""
    path, long = tmp_path / "rows", a_handle(prompt=tuple(range(5000)))
    with CaptureFolder(path, model="m") as folder:
        await folder.write([a_handle()], ME)
        before = folder.written(ME)
        with files_of_at_most(20_000), pytest.raises(CaptureMemoryFull, match="folder cannot be written") as full:
            await folder.write([long], ME)
        assert str(tmp_path) not in str(full.value)
        assert folder.written(ME) == before
        assert listed(path) == ["000000.safetensors"]
        assert [one.file for one in await folder.write([long], ME)] == ["000001.safetensors"]
        path.rename(tmp_path / "elsewhere")
        path.write_text("no folder")
        with pytest.raises(ServerFailure, match="folder cannot be written") as gone:
            await folder.write([a_handle()], ME)
        assert str(tmp_path) not in str(gone.value)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    assert len(listed(path)) == 2


async def test_a_client_that_goes_while_its_file_is_written_leaves_a_whole_one(tmp_path, monkeypatch) -> None:
    """Or none, where its turn has not come; the next one writes."""
    begun, go_on = threading.Event(), threading.Event()
    written = saving.files.write

    def slow(*given):
        begun.set()
        assert go_on.wait(120)
        return written(*given)

    with CaptureFolder(tmp_path, model="m") as folder:
        monkeypatch.setattr(saving.files, "write", slow)
        first, second = [asyncio.create_task(folder.write([a_handle()], ME)) for _ in range(2)]
        await asyncio.to_thread(begun.wait, 120)
        first.cancel()
        second.cancel()
        await asyncio.sleep(0)
        go_on.set()
        assert all(
            isinstance(one, asyncio.CancelledError)
            for one in await asyncio.gather(first, second, return_exceptions=True)
        )
        assert listed(tmp_path) == ["000000.safetensors"]
        assert [one.file for one in await folder.write([a_handle()], ME)] == ["000001.safetensors"]
        assert folder.written(ME) == sum(one.bytes for one in Manifest.load(tmp_path).requests)


async def test_a_server_that_ends_while_a_file_is_written_waits_for_it(tmp_path, monkeypatch) -> None:
    """The file is whole and listed; what comes after it is neither, and says so."""
    begun, go_on = threading.Event(), threading.Event()
    written = saving.files.write

    def slow(*given):
        begun.set()
        assert go_on.wait(120)
        return written(*given)

    folder = CaptureFolder(tmp_path, model="m")
    monkeypatch.setattr(saving.files, "write", slow)
    writing = asyncio.create_task(folder.write([a_handle(), a_handle()], ME))
    await asyncio.to_thread(begun.wait, 120)
    closing = asyncio.create_task(asyncio.to_thread(folder.close))
    while not folder._closed:
        await asyncio.sleep(0.01)
    go_on.set()
    await closing
    with pytest.raises(ServerFailure, match="this server is shutting down"):
        await writing
    assert listed(tmp_path) == ["000000.safetensors"]
    assert not (tmp_path / "manifest.journal").exists()
    folder.close()
