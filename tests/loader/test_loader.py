"""The loader keeps the order's promises with real processes, real tars and real decoding."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import mmstream as mm
from mmstream.errors import ConfigError, ShardError, StateError
from tests.helpers import topology
from tests.helpers.corpora import captioned, write_corpus
from tests.helpers.states import edited
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_ranks_together_deliver_the_plan_on_every_world(corpus, size, drop_last):
    pipeline = make_pipeline(corpus, drop_last=drop_last)
    assert global_keys(pipeline, size) == planned_keys(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_workers"), [(1, 1), (1, 2), (1, 3), (2, 2), (3, 1), (6, 1)])
@pytest.mark.parametrize("grid", [None, (2, 2), (3, 1)])
def test_workers_change_who_reads_and_not_what_comes(corpus, size, num_workers, grid):
    pipeline = make_pipeline(corpus, grid=grid)
    assert global_keys(pipeline, size, num_workers=num_workers) == planned_keys(pipeline)


def test_balanced_and_listed_rows_deliver_the_same_global_batches(corpus):
    pipeline = make_pipeline(corpus)
    assert global_keys(pipeline, 5, rows_per_rank="balanced") == planned_keys(pipeline)
    assert global_keys(pipeline, 2, rows_per_rank=[9, 3]) == planned_keys(pipeline)


def test_an_uneven_share_is_refused_before_any_read(corpus):
    with pytest.raises(ConfigError, match="balanced"):
        mm.Loader(make_pipeline(corpus), world=mm.World(0, 5))


@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_at_every_step_equals_the_tail_on_any_world(corpus, shuffle):
    pipeline = make_pipeline(corpus, shuffle=shuffle)
    first, second = planned_keys(pipeline, 0), planned_keys(pipeline, 1)
    walker = mm.Loader(pipeline)
    for step, _ in enumerate(walker, start=1):
        state = json.loads(json.dumps(walker.state_dict()))
        for size in (1, 2, 3):
            rest = []
            for loader in loaders(pipeline, size):
                loader.load_state_dict(state)
                rest.append(keys_of(loader))
            expected = first[step:] if step < len(first) else second
            assert [sum(parts, []) for parts in zip(*rest, strict=True)] == expected


@pytest.mark.slow
def test_a_resumed_loader_with_workers_continues_at_the_exact_step(corpus):
    pipeline = make_pipeline(corpus)
    expected = planned_keys(pipeline, 0) + planned_keys(pipeline, 1)
    loader = mm.Loader(pipeline, num_workers=2)
    seen = []
    for batch in loader:
        seen.append(batch["__key__"])
        if len(seen) == 3:
            break
    state = loader.state_dict()
    assert state["step"] == 3  # what was prefetched does not count
    loader.close()
    other = mm.Loader(pipeline, num_workers=1)
    other.load_state_dict(state)
    seen += keys_of(other) + keys_of(other)
    other.close()
    assert seen == expected


@pytest.mark.slow
def test_persistent_workers_survive_a_break_an_epoch_and_a_load(corpus):
    pipeline = make_pipeline(corpus)
    loader = mm.Loader(pipeline, num_workers=2)
    for _ in loader:
        break
    assert keys_of(loader) == planned_keys(pipeline, 0)[1:]
    assert keys_of(loader) == planned_keys(pipeline, 1)
    loader.load_state_dict(edited(loader.state_dict(), epoch=0, step=4))
    assert keys_of(loader) == planned_keys(pipeline, 0)[4:]
    loader.close()


def test_len_is_the_epochs_whatever_the_state_and_the_rank(corpus):
    pipeline = make_pipeline(corpus)
    loader = mm.Loader(pipeline, world=mm.World(1, 3))
    assert len(loader) == 8
    next(iter(loader))
    assert len(loader) == 8


def test_an_older_loop_over_the_same_loader_is_told_so(corpus):
    loader = mm.Loader(make_pipeline(corpus))
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(ConfigError, match="anew"):
        next(old)


def test_a_state_of_another_run_is_refused(corpus):
    state = edited(mm.Loader(make_pipeline(corpus)).state_dict(), step=2)
    with pytest.raises(StateError, match="global_batch_size was 12 and is 6"):
        mm.Loader(make_pipeline(corpus, global_batch_size=6)).load_state_dict(state)


def test_the_padded_tail_is_marked(corpus):
    pipeline = make_pipeline(corpus, drop_last=False)
    batches = list(mm.Loader(pipeline))
    assert [int(b["__valid__"].sum()) for b in batches] == [12] * 8 + [1]
    keys = [k for b in batches for k, ok in zip(b["__key__"], b["__valid__"], strict=True) if ok]
    assert sorted(keys) == [f"{n:06d}" for n in range(97)]


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
    pipeline = make_pipeline(corpus, decode=decoding(), transforms=(shout,))
    samples = pipeline.take(15)
    batches = list(mm.Loader(pipeline))
    assert [s["__key__"] for s in samples] == (batches[0]["__key__"] + batches[1]["__key__"])[:15]
    assert torch.equal(samples[3]["image"], batches[0]["image"][3])
    assert samples[0]["txt"].startswith("CAPTION")


def shout(sample):
    text = sample["txt"]
    return {**sample, "txt": (text.decode() if isinstance(text, bytes) else text).upper()}


def noisy(sample):
    return {**sample, "noise": float(mm.sample_rng(sample).random())}


@pytest.mark.slow
def test_augmentation_draws_are_the_same_on_every_topology_and_differ_by_epoch(corpus):
    pipeline = make_pipeline(corpus, transforms=(noisy,))
    in_one_process = mm.Loader(pipeline)
    first, second = (
        {
            key: noise
            for batch in in_one_process
            for key, noise in zip(batch["__key__"], batch["noise"].tolist())
        }
        for _ in range(2)
    )
    loader = mm.Loader(pipeline, num_workers=2, world=mm.World(1, 2))
    for batch in loader:
        for key, noise in zip(batch["__key__"], batch["noise"].tolist(), strict=True):
            assert noise == first[key]
    loader.close()
    in_both_epochs = first.keys() & second.keys()
    assert len(in_both_epochs) > 80  # of 97: an epoch leaves out the 1 that fills no batch
    assert all(first[key] != second[key] for key in in_both_epochs)


def test_a_lambda_for_workers_is_refused_with_the_way_out(corpus):
    pipeline = make_pipeline(corpus, transforms=(lambda sample: sample,))
    with pytest.raises(ConfigError, match="fork"):
        list(mm.Loader(pipeline, num_workers=1))
    assert len(list(mm.Loader(pipeline))) == 8


def broken(sample):
    return undefined_name  # noqa: F821


def test_a_bug_in_a_transform_stops_the_run(corpus):
    with pytest.raises(NameError):
        list(mm.Loader(make_pipeline(corpus, transforms=(broken,))))


@pytest.mark.slow
def test_an_exception_in_a_worker_arrives_with_its_shard(tmp_path):
    corpus = write_corpus(tmp_path, [20, 20])
    pipeline = make_pipeline(corpus, global_batch_size=4)
    Path(corpus, "shard-000001.tar").unlink()
    loader = mm.Loader(pipeline, num_workers=2)
    with pytest.raises(ShardError, match=r"shard-000001\.tar"):
        list(loader)
    loader.close()


def test_bytes_and_requests_are_counted_and_nothing_is_read_twice(corpus):
    pipeline = make_pipeline(corpus, window=64, drop_last=False)
    loader = mm.Loader(pipeline)
    list(loader)
    payload = sum(int(pipeline.dataset.offsets(s)[-1]) for s in range(pipeline.dataset.num_shards))
    assert loader.stats.num_samples == 97
    assert payload <= loader.stats.num_bytes < payload * 1.3  # the tail step repeats one sample
    assert 0 < loader.stats.num_requests < 60


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
        if sys.argv[2] == "raise": raise ValueError("user code")
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
@pytest.mark.parametrize("way", ["break", "raise", "interrupt", "kill"])
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


def test_a_pipeline_is_a_value_whose_variants_are_replaced(corpus):
    pipeline = make_pipeline(corpus)
    assert replace(pipeline, seed=6).order.identity() != pipeline.order.identity()
    assert captioned(1).keys() == {"jpg", "txt", "json"}


def test_pictures_are_decoded_into_the_batch_and_never_copied(corpus, monkeypatch):
    monkeypatch.setattr(torch, "stack", None)  # what a copy would be made with
    pipeline = make_pipeline(corpus, decode=decoding())
    for batch in mm.Loader(pipeline, num_threads=2):
        assert batch["image"].shape == (12, 3, 16, 16)


def test_a_loop_over_a_loader_that_was_closed_does_not_end_quietly(corpus):
    loader = mm.Loader(make_pipeline(corpus))
    loop = iter(loader)
    next(loop)
    loader.close()
    with pytest.raises(ConfigError, match="closed"):
        next(loop)


def test_what_standard_input_defines_is_refused_for_workers(corpus, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(ConfigError, match="fork"):
        next(iter(mm.Loader(make_pipeline(corpus), num_workers=1)))


TERMINATED = """
import multiprocessing.forkserver, os, signal, sys
import mmstream as mm
if __name__ == "__main__":
    pipeline = mm.Pipeline(mm.open_dataset(sys.argv[1]), global_batch_size=12)
    loader = mm.Loader(pipeline, num_workers=2)
    next(iter(loader))
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGTERM)
    print(sum(1 for _ in loader) + sum(1 for _ in loader))
    loader.close()
"""


@pytest.mark.slow
def test_a_sigterm_to_the_whole_job_does_not_take_the_fork_server(corpus, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(TERMINATED)
    command = [sys.executable, str(script), corpus]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "15\n"), done.stderr


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [True, False])
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
