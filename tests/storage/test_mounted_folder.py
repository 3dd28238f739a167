"""A folder that is mounted: a whole run through the kernel, with reads that fail."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import mmstream as mm
from mmstream.storage import SharedStore
from tests.helpers.corpora import write_corpus
from tests.helpers.faulty_mount import FaultyMount, faulty_mount, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def come_back(mount: FaultyMount) -> None:
    """Answer again once a request waits."""
    while not mount.set()["num_waiting"]:
        time.sleep(0.01)
    mount.set(is_away=False)


def epoch(pipeline: mm.Pipeline) -> list[Any]:
    """Return the keys and the raw bytes of all batches."""
    with closing(mm.Loader(pipeline)) as loader:
        return [(batch["__key__"], batch["jpg"], batch["txt"]) for batch in loader]


@pytest.mark.slow
def test_a_mount_whose_reads_fail_has_the_batches_of_the_folder(tmp_path: Path) -> None:
    folder, point = write_corpus(tmp_path / "a", [30, 1, 0, 40]), tmp_path / "point"
    point.mkdir()
    options: dict[str, Any] = {"global_batch_size": 8, "window": 5}
    expected = epoch(mm.Pipeline(mm.open_dataset(folder), **options))
    with faulty_mount(Path(folder), point) as mount:
        dataset = mm.open_dataset(point)
        assert not isinstance(dataset, mm.Mixture)
        assert isinstance(dataset.store, SharedStore)
        mount.set(is_away=True, fail_every=3, error=errno.ESTALE)
        helper = threading.Thread(target=come_back, args=(mount,))
        helper.start()
        assert epoch(mm.Pipeline(dataset, **options)) == expected
        helper.join()
        assert mount.set()["num_faults"]
