"""With several threads in one process, a step is prepared while the step before is decoded."""

import threading
from contextlib import closing

import pytest
import torch

import mmstream as mm
from mmstream.decoding.batch_memory import BatchMemory
from mmstream.decoding.sample import SampleDecoding
from mmstream.decoding.step import DecodeStage
from mmstream.pipeline import PipelineRunner
from mmstream.progress import Progress
from mmstream.reading.step import Job
from mmstream.train.tokenizer import byte_tokenizer
from tests.helpers.corpora import write_corpus

ROWS, STEPS = 4, 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, [7, 7, 6])
    return mm.open_dataset(folder)


def make_loader(dataset, num_threads, **settings):
    decode = mm.Decode(image=mm.ImageDecoder(size=16), text=mm.TextDecoder(byte_tokenizer()))
    pipeline = mm.Pipeline(dataset, global_batch_size=ROWS, decode=decode, **settings)
    return mm.Loader(pipeline, num_threads=num_threads)


def step_of(sample):
    return sample["__lineage__"].step


def note_prepared(monkeypatch, note):
    """Call a function with each step that is prepared, by whatever thread."""
    prepare = DecodeStage.prepare

    def noting(self, step):
        note(step.lineage)
        return prepare(self, step)

    monkeypatch.setattr(DecodeStage, "prepare", noting)


def test_a_step_is_prepared_while_the_step_before_is_decoded(dataset, monkeypatch):
    prepared = [threading.Event() for _ in range(STEPS + 1)]
    note_prepared(monkeypatch, lambda lineage: prepared[lineage.step].set())

    def decoded(sample):
        is_last = step_of(sample) == STEPS - 1
        assert is_last or prepared[step_of(sample) + 1].wait(500)
        return sample

    with closing(make_loader(dataset, 2, transforms=(decoded,))) as loader:
        assert len(list(loader)) == STEPS


def test_functions_of_the_user_are_not_called_ahead(dataset):
    seen = []

    def before(sample):
        seen.append((step_of(sample), threading.current_thread()))
        return sample

    with closing(make_loader(dataset, 4, before=(before,))) as loader:
        for number, _ in enumerate(loader, start=1):
            assert len(seen) == ROWS * number
    assert {thread for _, thread in seen} == {threading.current_thread()}


def test_an_error_of_a_step_waits_for_its_step(dataset, monkeypatch):
    def note(lineage):
        if lineage.step == 2:
            raise NameError("a bug")

    note_prepared(monkeypatch, note)
    with closing(make_loader(dataset, 2)) as loader:
        batches = iter(loader)
        assert [next(batches)["__lineage__"].step for _ in range(2)] == [0, 1]
        with pytest.raises(NameError, match="a bug"):
            next(batches)


def test_batches_and_states_are_those_of_one_thread(dataset):
    with closing(make_loader(dataset, 1)) as one, closing(make_loader(dataset, 3)) as three:
        for _ in range(2):
            for expected, batch in zip(one, three, strict=True):
                assert batch["__key__"] == expected["__key__"]
                assert torch.equal(batch["image"], expected["image"])
                assert torch.equal(batch["input_ids"], expected["input_ids"])
                assert three.state_dict() == one.state_dict()


def test_a_jump_within_an_epoch_drops_what_was_prepared(dataset):
    with closing(make_loader(dataset, 2)) as loader:
        batches = iter(loader)
        keys = [next(batches)["__key__"]]
        state = loader.state_dict()
        keys += [next(batches)["__key__"] for _ in range(2)]
        loader.load_state_dict(state)
        assert [batch["__key__"] for batch in loader][:2] == keys[1:]


class NotedPictures:
    """Counts the pictures that are decoded, by step."""

    def __init__(self, monkeypatch):
        self.counts = [0] * STEPS
        self.changed = threading.Condition()
        self.decode_picture = SampleDecoding.decode_picture
        monkeypatch.setattr(SampleDecoding, "decode_picture", lambda *each: self(*each))

    def __call__(self, decoding, field, out):
        self.decode_picture(decoding, field, out)
        with self.changed:
            self.counts[step_of(decoding.sample)] += 1
            self.changed.notify_all()

    def wait_for(self, step):
        with self.changed:
            assert self.changed.wait_for(lambda: self.counts[step] == ROWS, 120)


def test_the_pictures_of_one_more_step_are_decoded_while_a_batch_is_used(dataset, monkeypatch):
    pictures, progress = NotedPictures(monkeypatch), Progress()
    pipeline = make_loader(dataset, 2).pipeline
    with closing(PipelineRunner(pipeline, num_threads=2, progress=progress)) as runner:
        for step in range(STEPS):
            runner.batch(Job(0, step, 0, ROWS))
            if step + 1 < STEPS:
                pictures.wait_for(step + 1)
            assert pictures.counts == [ROWS] * min(step + 2, STEPS) + [0] * (STEPS - step - 2)
            assert progress.last().step == step  # which a warning would name


def test_a_bug_in_a_picture_that_is_decoded_ahead_waits_for_its_step(dataset, monkeypatch):
    has_failed = threading.Event()

    def decode_picture(decoding, field, out):
        if step_of(decoding.sample) == 2:
            has_failed.set()
            raise NameError("a bug")
        noted(decoding, field, out)

    noted = NotedPictures(monkeypatch)
    monkeypatch.setattr(SampleDecoding, "decode_picture", decode_picture)
    with closing(make_loader(dataset, 2)) as loader:
        batches = iter(loader)
        assert [next(batches)["__lineage__"].step for _ in range(2)] == [0, 1]
        assert has_failed.wait(500)
        with pytest.raises(NameError, match="a bug"):
            next(batches)
        assert loader.state_dict()["step"] == 2


def test_the_memory_of_a_batch_is_used_again(dataset):
    for num_threads, num_held in ((1, 1), (2, 2)):
        memory = BatchMemory()
        pipeline = make_loader(dataset, 1).pipeline
        runner = PipelineRunner(pipeline, num_threads=num_threads, memory=memory)
        with closing(runner):
            for step in range(STEPS):
                runner.batch(Job(0, step, 0, ROWS))
                assert len(memory.numbers) <= num_held


def test_what_python_alone_decodes_has_one_thread_unless_told(dataset, monkeypatch):
    monkeypatch.setattr("mmstream.loader.batch_makers.default_threads", lambda: 2)

    def threads_of(num_threads=None, **settings):
        before = set(threading.enumerate())  # those of other tests may still be ending
        pipeline = mm.Pipeline(dataset, global_batch_size=ROWS, **settings)
        with closing(mm.Loader(pipeline, num_threads=num_threads)) as loader:
            next(iter(loader))
            own = set(threading.enumerate()) - before
            return {thread.name.partition("_")[0] for thread in own}

    values = mm.Decode({"txt": str})
    assert "mmstream-prepare" not in threads_of(decode=values)
    assert "mmstream-prepare" in threads_of(decode=values, transforms=(dict,))
    assert "mmstream-prepare" in threads_of(2, decode=values)
