"""Stores that are not Amazon S3: a conversion and a training through a proxy that behaves so."""

from __future__ import annotations

import logging
import os
import time
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import mmstream as mm
from mmstream.errors import StorageError
from mmstream.storage import open_store, remote, retry, upload, write_lock
from tests.helpers.corpora import jpeg
from tests.helpers.forked_ranks import run_starts
from tests.helpers.logged_runs import require_exact
from tests.helpers.store_proxy import HOST, STORES, store_proxy

pytestmark = pytest.mark.s3


@pytest.fixture
def store(request, s3, monkeypatch, tmp_path):
    """A URL behind the proxy of a store, set up as the docs say, and the proxy."""
    kind = STORES[request.param]
    with store_proxy(os.environ, kind) as proxy:
        style = "s3 =\n    addressing_style = virtual\n" if kind.path_style else ""
        (tmp_path / "config").write_text(f"[default]\n{style}")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}")
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, kind.region or "us-east-1")
        monkeypatch.setattr(write_lock, "SETTLE_S", 0.1)
        monkeypatch.setattr(upload, "PART_BYTES", 5 << 20)  # the least that stores take
        retry._health.cache_clear()
        remote._client_of.cache_clear()
        yield f"{s3}/{tmp_path.name}", proxy
    remote._client_of.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("store", [s for s in STORES if STORES[s].path_style], indirect=True)
@pytest.mark.parametrize("call", ["list", "read"])
def test_a_store_that_refuses_path_style_names_the_setting(store, call, monkeypatch):
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    remote._client_of.cache_clear()
    url, _ = store
    with pytest.raises(StorageError, match=r": 403 \w+ .*s3\.addressing_style virtual") as caught:
        open_store(url).list() if call == "list" else mm.open_dataset(url)
    assert "credentials" not in str(caught.value)


@pytest.mark.parametrize(
    ("store", "warns"),
    [("MinIO", False), ("GCS", True), ("Backblaze B2", True)],
    indirect=["store"],
)
def test_a_store_without_conditional_writes_is_told_of_and_one_of_two_writers_gives_up(
    store, warns, monkeypatch, caplog
):
    url, _ = store
    folder = open_store(url)
    others = write_lock.Holder("t", "convert", "far", "b", "n", 7, 8, "2026-11-28 12:00:00 UTC")
    write = partial(folder.write, write_lock.LOCK_NAME, msgspec.json.encode(others))
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda _: write()})  # of the lock alone
    monkeypatch.setattr(write_lock, "time", clock)
    with caplog.at_level(logging.WARNING):
        if warns:
            with pytest.raises(write_lock.LockedError, match="another convert"):
                write_lock.write_lock(folder, "index").__enter__()
        else:
            with write_lock.write_lock(folder, "index"):
                pass
    assert ("no conditional writes (If-None-Match)" in caplog.text) == warns


def convert_to(url, folder):
    """Convert 24 pictures to a store."""
    for number in range(24):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    rows = [{"image": f"{number}.jpg", "text": f"picture {number}"} for number in range(24)]
    settings = {"media_root": str(folder), "samples_per_shard": 8, "progress": False}
    assert mm.convert(rows, url, **settings).num_samples == 24


def loader_of(url):
    decode = mm.Decode(image=mm.ImageDecoder(size=16))
    return mm.Loader(mm.Pipeline(mm.open_dataset(url), global_batch_size=6, seed=1, decode=decode))


def content(batch):
    return batch["__key__"], batch["image"].tolist()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A conversion to a local folder, and the batches of an epoch."""
    media = tmp_path_factory.mktemp("media")
    convert_to(str(media / "local"), media)
    with closing(loader_of(str(media / "local"))) as loader:
        return media / "local", list(map(content, loader))


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_conversion_and_a_resumed_epoch_are_exact(store, local, tmp_path):
    url, _ = store
    folder, expected = local
    convert_to(url, tmp_path)
    shards = [path.name for path in folder.glob("*.tar*")]
    assert len(shards) >= 9
    assert [n for n in shards if open_store(url).read(n) != Path(folder, n).read_bytes()] == []
    with closing(loader_of(url)) as loader:
        first = list(map(content, islice(loader, 2)))
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert first + list(map(content, loader)) == expected
    require_written(store)


def require_written(store):
    """Write in one request and in parts, and read whole and by ranges."""
    url, proxy = store
    data = os.urandom(upload.PART_BYTES + 5)
    folder = open_store(f"{url}/new")
    with write_lock.write_lock(folder, "test") as lock:
        folder.write("small", data[:100])
        folder.write("large", data)
        lock.require()
    assert folder.read("large", len(data)) == data
    assert folder.read_range("large", 7, 1007) == data[7:1007]
    assert {name: stat.size for name, stat in folder.list().items()} == {
        "large": len(data),
        "small": 100,
    }
    folder.remove("small")
    assert not folder.exists("small")
    assert set(proxy.refused) <= {"InvalidArgument", "NotImplemented"}  # of optional headers


@pytest.mark.slow
@pytest.mark.parametrize("store", ["Aliyun OSS"], indirect=True)
def test_a_killed_and_resumed_training_is_exact(store, tmp_path):
    url, _ = store
    convert_to(url, tmp_path)
    out = tmp_path / "run"
    command = f"{url} --global-batch-size 6 --epochs 2 --checkpoint-every 1 --device cpu --seed 1"
    command += " --image-size 16 --num-workers 0 --log-keys --model clip"
    run_starts(command.split(), out, [(1, 2), (1, None)])
    require_exact(url, out, num_steps=8)
