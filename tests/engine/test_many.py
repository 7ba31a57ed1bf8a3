"""One data set from many engines: actors of Ray's, killed at random; and in S3, where the server is Ceph's radosgw."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import ceph
import pytest
from conftest import opened
from ray_kills import ENVIRONMENT, a_model, corpus, corpus_of
from support.faults.base import COLLECTED
from support.folders import digests
from support.rows import TINY_ENGINE

from steercap import Progress, errors
from steercap.lab.datasets import RemoteFolder, verify
from steercap.lab.datasets.collecting import RayActors, collect
from steercap.testing import tiny_checkpoint

HERE = Path(__file__).parent.parent

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'steercap[ray]'")
with_ceph = [
    pytest.mark.skipif(find_spec("s3fs") is None, reason="needs s3fs"),
    pytest.mark.skipif(not ceph.can_be_had(), reason="needs Debian's ceph-mon, ceph-osd, ceph-common and radosgw"),
]


@with_ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [0, pytest.param(10, marks=pytest.mark.extended)])
async def test_actors_may_be_killed_at_any_moment(tmp_path, kills, monkeypatch) -> None:
    """The data set of two actors, whose processes are killed at random, is that of one engine, file by file; that of one
    actor, which nobody kills, is so too.
    """
    command = [sys.executable, str(HERE / "ray_kills.py"), str(tmp_path / "ray"), str(kills), str(os.getpid())]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = partial(subprocess.run, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    done = await asyncio.to_thread(run, command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    async with opened(tiny_checkpoint("qwen3"), **TINY_ENGINE) as model:
        await collect(model, corpus_of(kills), tmp_path / "alone", **COLLECTED)
    assert digests(tmp_path / "ray") == digests(tmp_path / "alone")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
async def test_without_ray_the_extra_is_named(tmp_path) -> None:
    """The error names what to install, and nothing was begun."""
    with pytest.raises(errors.MissingExtra, match=r"steercap\[ray\]"):
        await collect(a_model(), corpus(), tmp_path / "data", ray=RayActors(2), **COLLECTED)


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", [pytest.param("radosgw", marks=with_ceph)])
def test_a_put_that_is_interrupted_leaves_nothing(tmp_path, server) -> None:
    """Neither an object of what had come, whether it was one part or several, nor parts that wait for the others."""
    with ceph.ceph(tmp_path) as cluster:
        import s3fs

        assert server in cluster.running
        system = s3fs.S3FileSystem(**cluster.options)
        system.mkdir("bucket")
        folder = RemoteFolder("s3://bucket/data", **cluster.options)

        def chunks(count: int, *, broken: bool):
            for _ in range(count):
                yield bytes(1 << 20)
            if broken:
                raise KeyboardInterrupt

        folder.write("there", chunks(1, broken=False))
        for count in (0, 1, 160):
            for name in ("there", "new"):
                with pytest.raises(KeyboardInterrupt):
                    folder.write(name, chunks(count, broken=True))
        assert folder.sizes() == {"there": 1 << 20}
        assert not system.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
        folder.write("new", chunks(120, broken=False))
        assert folder.sizes() == {"there": 1 << 20, "new": 120 << 20}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("server", [pytest.param("radosgw", marks=with_ceph)])
async def test_a_data_set_in_s3_is_that_on_disk(tmp_path, server) -> None:
    """Collected into a bucket of Ceph's, with the server killed in the middle: a clean stop, which the same call goes on
    from; every file is that of a folder.
    """
    (tmp_path / "ceph").mkdir()
    with ceph.ceph(tmp_path / "ceph") as cluster:
        import s3fs

        assert server in cluster.running
        system = s3fs.S3FileSystem(**cluster.options)
        system.mkdir("bucket")
        where = {"storage_options": cluster.options | {"config_kwargs": {"retries": {"max_attempts": 1}}}}

        def die(progress: Progress) -> None:
            if progress.details["shards"] >= 3 and server in cluster.running:
                cluster.kill(server)

        async with a_model() as model:
            with pytest.raises(errors.CollectionStopped, match="s3://bucket/data cannot be written to"):
                await collect(model, corpus(), "s3://bucket/data", progress=die, **where, **COLLECTED)
            cluster.serve()
            done = await collect(model, corpus(), "s3://bucket/data", **where, **COLLECTED)
            assert done.resumed >= 2
            await collect(model, corpus(), tmp_path / "data", **COLLECTED)
        assert verify("s3://bucket/data", **cluster.options) == verify(tmp_path / "data")
        system.get("bucket/data", str(tmp_path / "copy"), recursive=True)
    assert digests(tmp_path / "copy") == digests(tmp_path / "data")
