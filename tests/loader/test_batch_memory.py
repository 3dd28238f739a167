"""Memory of batches is used again, but never while somebody looks at it. Batches cross whole."""

import gc
import os
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

import mmstream as mm
from mmstream.decoding.batch_memory import MAX_FREE_BLOCKS, BatchMemory
from mmstream.loader.batch_transport import BatchReceiver, SentBatch
from tests.helpers.corpora import write_corpus
from tests.helpers.pictures import encoded, photo

MIB = 1 << 20


def cross(batch, memory, receiver):
    sent = SentBatch(batch, memory, receiver.number)
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(sent)))


@pytest.fixture
def crossed():
    return partial(cross, receiver=BatchReceiver())


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_used_again_once_nobody_looks_at_it(shared):
    memory = BatchMemory(shared=shared)
    first = memory.take(MIB)
    where = first.data_ptr()
    del first
    gc.collect()
    assert memory.take(MIB).data_ptr() == where
    assert memory.num_bytes < 2 * MIB


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[5:9],
        lambda t: t.view(4, -1).T,
        lambda t: t.numpy()[3:],
        lambda t: iter(t.view(4, -1)),
    ],
)
def test_memory_is_not_used_again_while_a_view_of_it_lives(keep):
    memory = BatchMemory()
    taken = memory.take(MIB)
    where, kept = taken.data_ptr(), keep(taken)
    del taken
    gc.collect()
    assert memory.take(MIB).data_ptr() != where
    del kept


def test_what_was_sent_stays_until_the_other_side_has_dropped_it(crossed):
    memory = BatchMemory(shared=True)
    pictures = memory.take(MIB)
    where = pictures.data_ptr()
    pictures.fill_(7)
    arrived = crossed({"image": pictures}, memory)
    del pictures
    gc.collect()
    other = memory.take(MIB)
    assert other.data_ptr() != where
    other.fill_(8)
    assert arrived["image"].eq(7).all()
    row = arrived["image"][10:20]
    del arrived, other
    gc.collect()
    memory.take(MIB).fill_(9)
    assert row.eq(7).all()
    del row
    gc.collect()
    assert memory.num_bytes < 3 * MIB


def test_tensors_of_any_shape_type_and_layout_cross_as_they_are(crossed):
    memory = BatchMemory(shared=True)
    pictures = memory.take(4 * 6 * 5 * 3).view(4, 6, 5, 3)
    pictures.copy_(torch.arange(360).view(4, 6, 5, 3) % 251)
    shared = torch.arange(6.0)
    batch = {
        "image": pictures.permute(0, 3, 1, 2),
        "ids": torch.arange(12).view(3, 4),
        "nested": {"turned": torch.arange(6, dtype=torch.int16).view(2, 3).T, "none": None},
        "list": [torch.zeros(0, 5), torch.tensor(3.5, dtype=torch.bfloat16), "text"],
        "twice": [shared, shared],
        "wide": torch.arange(3).expand(4, 3),
        "gaps": torch.arange(20)[::3],
        "bools": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "grad": torch.ones(2, requires_grad=True).detach(),
        "array": np.arange(3),
        "arrays": [np.array([None]), np.zeros(2)],
        "tuple": (1, torch.ones(2)),
        "pictures": [torch.arange(n * 15).view(n, 5, 3).permute(2, 0, 1) for n in (3, 8)],
        "scalars": [torch.tensor(3), torch.tensor(4)],
        "kinds": [torch.ones(2), torch.ones(2, dtype=torch.int8)],
        "empty": [],
    }
    arrived = crossed(batch, memory)
    sent_values, structure = tree_flatten(batch)
    received_values, received_structure = tree_flatten(arrived)
    assert received_structure == structure
    for sent, received in zip(sent_values, received_values, strict=True):
        assert type(sent) is type(received)
        if isinstance(sent, torch.Tensor):
            assert (sent.dtype, sent.shape) == (received.dtype, received.shape)
            assert torch.equal(sent, received)
            assert received.is_contiguous() or not sent.is_contiguous()
        else:
            assert np.array_equal(sent, received)
    assert arrived["image"].is_contiguous(memory_format=torch.channels_last)
    for sent, received in zip(batch["pictures"], arrived["pictures"], strict=True):
        assert sent.stride() == received.stride()


class Wrapped:
    """What a transform of a user may make."""

    def __init__(self, data, pixels):
        self.data, self.pixels = data, pixels


def test_long_bytes_cross_in_the_shared_memory_and_arrive_as_bytes():
    memory, receiver = BatchMemory(shared=True), BatchReceiver()
    files = [os.urandom(size) for size in (0, 1, 1023, 1024, 1025, 70_001)]
    batch = {
        "jpg": files,
        "ids": torch.arange(7),
        "samples": [{"mp4": file, "key": "a"} for file in files[3:]],
        "wrapped": Wrapped(files[5], torch.ones(3, 5)),
        "writable": bytearray(files[4]),
    }
    sent = ForkingPickler.dumps(SentBatch(batch, memory, receiver.number))
    assert len(sent) < 8000
    arrived = ForkingPickler.loads(bytes(sent))
    memory.take(MIB).fill_(9)  # the block of the batch is not free yet
    assert arrived["jpg"] == files
    assert {type(file) for file in arrived["jpg"]} == {bytes}
    assert arrived["samples"] == batch["samples"]
    # It crosses once.
    assert arrived["samples"][2]["mp4"] is arrived["wrapped"].data is arrived["jpg"][5]
    assert torch.equal(arrived["wrapped"].pixels, torch.ones(3, 5))
    assert arrived["writable"] == bytearray(files[4])
    assert torch.equal(arrived["ids"], torch.arange(7))


def test_views_of_bytes_cross_without_a_copy_of_their_own_and_arrive_as_bytes(crossed):
    data = bytes(range(256)) * 20
    views = [memoryview(data)[start:stop] for start, stop in ((0, 5000), (7, 9), (3, 3))]
    arrived = crossed({"views": views}, BatchMemory(shared=True))["views"]
    assert arrived == [data[:5000], data[7:9], b""]
    assert {type(value) for value in arrived} == {bytes}
    with pytest.raises(TypeError, match="memoryview"):  # no bytes, so it is refused as ever
        crossed(memoryview(np.zeros(3)), BatchMemory(shared=True))


def test_a_batch_of_bytes_gives_its_memory_back_at_once(crossed):
    memory = BatchMemory(shared=True)
    kept = [crossed({"jpg": [os.urandom(MIB)]}, memory) for _ in range(20)]
    assert memory.num_bytes < 4 * MIB
    assert len({batch["jpg"][0] for batch in kept}) == 20


def num_maps():
    return Path("/proc/self/maps").read_text().count("mmstream-batch")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps the Linux way")
def test_a_block_is_mapped_once_by_each_side_and_dropped_by_both():
    before = num_maps()
    memory, receiver = BatchMemory(shared=True), BatchReceiver()
    batch = None
    for number in range(8):
        batch = cross({"ids": torch.full((50_000,), number)}, memory, receiver)
        assert batch["ids"].unique().tolist() == [number]
    assert num_maps() - before == 2 * len(memory.numbers)
    for size in range(1, 2 * MAX_FREE_BLOCKS + 3):  # each needs a larger block than all before
        batch = cross({"ids": torch.ones(4**size // 4, dtype=torch.uint8)}, memory, receiver)
    assert len(memory.numbers) <= MAX_FREE_BLOCKS + 2
    assert num_maps() - before == 2 * len(memory.numbers)
    del batch, memory, receiver
    gc.collect()
    assert num_maps() == before


def test_a_batch_that_cannot_be_pickled_is_an_error_in_the_worker():
    with pytest.raises(AttributeError, match="local object"):
        SentBatch({"function": lambda: 0}, BatchMemory(shared=True), receiver=0)


def numbered(number):
    jpg = encoded(photo().resize((40 + number, 36)), "jpeg")
    return {"jpg": jpg, "txt": b"n %d" % number}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("memory"), [48], numbered)


def make_pipeline(corpus):
    decode = mm.Decode(image=mm.ImageDecoder(size=32))
    return mm.Pipeline(mm.open_dataset(corpus), global_batch_size=4, decode=decode)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "num_threads"), [(0, 3), (2, 1)])
def test_batches_that_are_kept_never_change(corpus, num_workers, num_threads):
    """Each is copied when it comes, and all are kept while memory is used again behind them."""
    loader = mm.Loader(make_pipeline(corpus), num_workers=num_workers, num_threads=num_threads)
    kept, copies, rows = [], [], []
    for _ in range(2):
        for number, batch in enumerate(loader):
            copies.append(batch["image"].clone())
            if number % 2:
                kept.append((len(copies) - 1, batch["image"]))
            else:
                rows.append((len(copies) - 1, batch["image"][2]))
    assert all(torch.equal(copies[number], image) for number, image in kept)
    assert all(torch.equal(copies[number][2], image) for number, image in rows)
    loader.close()
    assert all(torch.equal(copies[number], image) for number, image in kept)


@pytest.mark.slow
def test_a_loaders_memory_counts_its_workers(corpus):
    loader = mm.Loader(make_pipeline(corpus), num_workers=1)
    alone = loader.memory_bytes()
    assert len(list(loader)) == len(loader)  # made here, it may be, while the worker starts
    next(iter(loader))
    assert loader.memory_bytes() > alone + 10 * MIB
    loader.close()


def test_a_tensor_that_crosses_in_two_batches_is_not_written_over(crossed):
    memory = BatchMemory(shared=True)
    image = memory.take(MIB)
    image.fill_(1)
    first = crossed({"image": image, "note": torch.full((9,), 6)}, memory)
    second = crossed({"before": image[:1000], "note": torch.full((9,), 7)}, memory)
    assert first["note"].unique().tolist() == [6]
    del image, first  # the worker and the first receiver have let go, the second one has not
    gc.collect()
    for value in (2, 3, 4):
        crossed({"image": memory.take(MIB).fill_(value)}, memory)
    assert second["before"].unique().tolist() == [1]
    assert second["note"].unique().tolist() == [7]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files the Linux way")
def test_a_list_of_pictures_crosses_as_one_open_file_not_one_each(crossed):
    pictures = [torch.full((4 + n, 5, 3), n).permute(2, 0, 1) for n in range(100)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    arrived = crossed({"image": pictures}, BatchMemory(shared=True))["image"]
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 5
    assert all(torch.equal(a, b) for a, b in zip(pictures, arrived, strict=True))
