"""The loader keeps the order's promises with real processes, real tars and real decoding."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import compress
from pathlib import Path

import psutil
import pytest
import torch

import mmstream as mm
from tests.helpers import topology
from tests.helpers.wait import has_ended, wait_until


def make_pipeline(corpus, **settings):
    settings = {"global_batch_size": 12, "seed": 5, "window": 16, **settings}
    return mm.Pipeline(mm.open_dataset(corpus), **settings)


def decoding(**settings):
    return mm.Decode(image=mm.ImageDecoder(size=16), **settings)


def keys_of(loader):
    return [batch["__key__"] for batch in loader]


def loaders(pipeline, size, **settings):
    return [mm.Loader(pipeline, world=mm.World(rank, size), **settings) for rank in range(size)]


def global_keys(pipeline, size, **settings):
    """Per step, the keys of all ranks in the order of rows."""
    ranks = loaders(pipeline, size, **settings)
    try:
        columns = [keys_of(loader) for loader in ranks]
    finally:
        for loader in ranks:
            loader.close()
    return [sum(parts, []) for parts in zip(*columns, strict=True)]


def planned_keys(pipeline, epoch=0):
    numbers = {}
    dataset = pipeline.dataset
    for i in range(len(dataset)):
        sample = dataset[i]
        numbers[sample["__lineage__"][:2]] = sample["__key__"]
    order = pipeline.order
    return [
        [numbers[s, i] for s, i in zip(*(a.tolist() for a in order.refs(epoch, step)[:2]))]
        for step in range(order.steps_per_epoch)
    ]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("size", "shares"),
    [(1, None), (3, None), (5, "balanced"), (2, [9, 3])],
)
def test_the_ranks_together_deliver_the_plan_on_every_world(corpus, size, shares, drop_last):
    pipeline = make_pipeline(corpus, drop_last=drop_last)
    assert global_keys(pipeline, size, rows_per_rank=shares) == planned_keys(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_workers", "grid"),
    [(1, 3, (2, 2)), (2, 2, (2, 2)), (3, 1, None)],
)
def test_workers_change_who_reads_and_not_what_comes(corpus, size, num_workers, grid):
    pipeline = make_pipeline(corpus, grid=grid)
    assert global_keys(pipeline, size, num_workers=num_workers) == planned_keys(pipeline)


def test_an_uneven_share_is_refused_before_any_read(corpus):
    with pytest.raises(mm.ConfigError, match="balanced"):
        mm.Loader(make_pipeline(corpus), world=mm.World(0, 5))


def test_len_is_the_epochs_whatever_the_state_and_the_rank(corpus):
    pipeline = make_pipeline(corpus)
    loader = mm.Loader(pipeline, world=mm.World(1, 3))
    assert len(loader) == 8
    next(iter(loader))
    assert len(loader) == 8


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessing_context", ["forkserver", "spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*")
def test_images_are_the_same_from_every_start_method_and_thread_count(
    corpus, multiprocessing_context
):
    pipeline = make_pipeline(corpus, decode=decoding())
    plain = list(mm.Loader(pipeline, num_threads=1))
    threaded = list(mm.Loader(pipeline, num_threads=3))
    loader = mm.Loader(pipeline, num_workers=1, multiprocessing_context=multiprocessing_context)
    workers = list(loader)
    loader.close()
    for ours in (threaded, workers):
        assert all(
            torch.equal(a["image"], b["image"]) and a["__key__"] == b["__key__"]
            for a, b in zip(plain, ours, strict=True)
        )
    image = plain[0]["image"]
    assert image.shape == (12, 3, 16, 16)
    assert image.dtype == torch.uint8
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_take_shows_the_first_samples_as_they_enter_a_batch(corpus):
    louder = (lambda sample: {**sample, "txt": sample["txt"].upper()},)
    pipeline = make_pipeline(corpus, decode=decoding(), transforms=louder)
    samples = pipeline.take(15)
    batches = list(mm.Loader(pipeline))
    assert [s["__key__"] for s in samples] == (batches[0]["__key__"] + batches[1]["__key__"])[:15]
    assert torch.equal(samples[3]["image"], batches[0]["image"][3])
    assert samples[0]["txt"].isupper()


def test_take_goes_on_behind_rows_that_are_not_valid(corpus):
    def only_even(sample):
        if int(sample["__key__"]) % 2:
            raise mm.SkipSample("odd")
        return sample

    policy = mm.BadSamplePolicy(action="mask")
    pipeline = make_pipeline(corpus, before=(only_even,), bad_samples=policy)
    batches = list(mm.Loader(pipeline))
    keys = [key for batch in batches for key in compress(batch["__key__"], batch["__valid__"])]
    assert len(keys) < sum(len(batch["__key__"]) for batch in batches)
    for num_samples in (5, 20):
        assert [sample["__key__"] for sample in pipeline.take(num_samples)] == keys[:num_samples]


def test_a_lambda_for_workers_is_refused_with_the_way_out(corpus):
    pipeline = make_pipeline(corpus, transforms=(lambda sample: sample,))
    with pytest.raises(mm.ConfigError, match="fork"):
        list(mm.Loader(pipeline, num_workers=1))
    assert len(list(mm.Loader(pipeline))) == 8


def test_bytes_and_requests_are_counted_and_nothing_is_read_twice(corpus):
    pipeline = make_pipeline(corpus, window=64, drop_last=False)
    loader = mm.Loader(pipeline)
    list(loader)
    payload = sum(
        int(pipeline.dataset.shards.offsets(s)[-1]) for s in range(pipeline.dataset.num_shards)
    )
    assert loader.stats.num_samples == 97
    assert payload <= loader.stats.num_bytes < payload * 1.3  # the tail step repeats one sample
    assert 0 < loader.stats.num_requests < 60


def slow_transform(sample):
    time.sleep(0.002)
    return sample


def slow_collate(samples):
    time.sleep(0.01)
    return mm.collate(samples)


def test_the_time_of_each_stage_is_counted(corpus):
    pipeline = make_pipeline(corpus, transforms=[slow_transform], collate=slow_collate)
    loader = mm.Loader(pipeline)
    num_steps = len(list(loader))
    assert loader.stats.decode_s > 0.002 * 12 * num_steps
    assert loader.stats.collate_s > 0.01 * num_steps
    assert loader.stats.read_s > 0


SCRIPT = """
import sys
import mmstream as mm
if __name__ == "__main__":
    pipeline = mm.Pipeline(mm.open_dataset(sys.argv[1]), global_batch_size=4)
    loader = mm.Loader(pipeline, num_workers=2)
    for batch in loader:
        print("step", flush=True)
        sys.stdin.readline()  # until the test has looked, or has sent a signal
        if sys.argv[2] == "break": break
    print("left", flush=True)
"""


def shared_memory_of(family):
    """The files of /dev/shm that processes map, or that have the number of one in their name."""
    mapped = ""
    for process in family:
        with contextlib.suppress(OSError):
            mapped += Path(f"/proc/{process.pid}/maps").read_text()
    numbers = {str(process.pid) for process in family}
    return [
        path
        for path in Path("/dev/shm").iterdir()
        if str(path) in mapped or numbers & set(path.name.split("_"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "break", "interrupt"])
def test_no_process_and_no_shared_memory_outlives_a_run(corpus, tmp_path, way):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), corpus, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline().strip() == "step"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    shared = shared_memory_of([psutil.Process(process.pid), *family])
    assert shared  # the locks of queues, at least
    if way in ("interrupt", "kill"):
        sig = signal.SIGINT if way == "interrupt" else signal.SIGKILL
        (os.killpg if way == "interrupt" else os.kill)(process.pid, sig)
    process.communicate(timeout=500)
    assert (process.returncode == 0) == (way == "break")
    wait_until(lambda: all(has_ended(child.pid) for child in family), lambda: family)
    # Python's resource tracker removes what a killed process has left.
    wait_until(lambda: not any(path.exists() for path in shared))


def test_a_loop_over_a_loader_that_was_closed_does_not_end_quietly(corpus):
    loader = mm.Loader(make_pipeline(corpus))
    loop = iter(loader)
    next(loop)
    loader.close()
    with pytest.raises(mm.ConfigError, match="closed"):
        next(loop)


def test_what_standard_input_defines_is_refused_for_workers(corpus, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(mm.ConfigError, match="fork"):
        next(iter(mm.Loader(make_pipeline(corpus), num_workers=1)))


@pytest.mark.slow
def test_a_sigterm_to_the_whole_job_does_not_take_the_fork_server(corpus):
    from multiprocessing import forkserver

    with contextlib.closing(mm.Loader(make_pipeline(corpus), num_workers=2)) as loader:
        next(iter(loader))
        pid = forkserver._forkserver._forkserver_pid
        os.kill(pid, signal.SIGTERM)
        loader.load_state_dict(loader.state_dict())
        assert [sum(1 for _ in loader) for _ in range(2)] == [7, 8]
        loader.close()
        assert len(list(loader)) == 8  # its workers come from the same server
        assert forkserver._forkserver._forkserver_pid == pid


@pytest.mark.parametrize(
    ("size", "num_workers", "drop_last"),
    [(2, 3, False), (3, 1, True), (6, 2, True)],
)
def test_every_world_and_worker_count_puts_the_plan_together(corpus, size, num_workers, drop_last):
    pipeline = make_pipeline(corpus, drop_last=drop_last, grid=(2, 3))
    whole = topology.run(pipeline, size, num_workers).steps
    assert [step.keys for step in whole] == planned_keys(pipeline)
    for start in range(1, len(whole)):  # a resume at any step
        rest = range(start, len(whole))
        assert topology.run(pipeline, size, num_workers, rest).steps == whole[start:]


def test_a_loop_over_a_pipeline_is_told_to_take_a_loader(corpus):
    with pytest.raises(mm.ConfigError, match=r"write `for batch in mm\.Loader\(pipeline\)`"):
        next(iter(make_pipeline(corpus)))
