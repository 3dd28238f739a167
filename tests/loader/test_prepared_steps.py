"""With several threads in one process, a step is prepared while the step before is decoded."""

import threading
from contextlib import closing

import pytest
import torch

import mmstream as mm
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


def test_a_step_is_prepared_while_the_step_before_is_decoded(dataset):
    prepared = [threading.Event() for _ in range(STEPS + 1)]

    def before(sample):
        prepared[step_of(sample)].set()
        return sample

    def decoded(sample):
        is_last = step_of(sample) == STEPS - 1
        assert is_last or prepared[step_of(sample) + 1].wait(30)
        return sample

    with closing(make_loader(dataset, 2, before=(before,), transforms=(decoded,))) as loader:
        assert len(list(loader)) == STEPS


def test_nothing_is_prepared_for_the_next_epoch(dataset):
    prepared = []

    def before(sample):
        prepared.append(sample["__lineage__"].epoch)
        return sample

    with closing(make_loader(dataset, 2, before=(before,))) as loader:
        list(loader)
        assert prepared == [0] * ROWS * STEPS
        list(loader)
    assert prepared == [0] * ROWS * STEPS + [1] * ROWS * STEPS


def test_an_error_of_a_step_waits_for_its_step(dataset):
    def before(sample):
        if step_of(sample) == 2:
            raise NameError("a bug")
        return sample

    with closing(make_loader(dataset, 2, before=(before,))) as loader:
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


def make_latent(data):
    return len(data)


HOLDS_INTERPRETER = {
    "baked fields": (mm.Decode.baked(), True),
    "numbers and arrays": (mm.Decode({"cls": int, "npy": ..., "txt": str}), True),
    "pictures": (mm.Decode(image=mm.ImageDecoder()), False),
    "a picture by field": (mm.Decode({"jpg": ...}), False),
    "texts": (mm.Decode(text=mm.TextDecoder(byte_tokenizer())), False),
    "sound": (mm.Decode(audio=mm.AudioDecoder()), False),
    "a function of the user": (mm.Decode({"npy": make_latent}), False),
}


@pytest.mark.parametrize("name", HOLDS_INTERPRETER)
def test_decoders_of_media_and_functions_of_the_user_may_leave_the_interpreter_free(name):
    decode, expected = HOLDS_INTERPRETER[name]
    assert decode.holds_interpreter == expected


def test_what_python_alone_decodes_has_one_thread_unless_told(dataset, monkeypatch):
    monkeypatch.setattr("mmstream.loader.loader.default_threads", lambda: 2)

    def threads_of(num_threads=None, **settings):
        pipeline = mm.Pipeline(dataset, global_batch_size=ROWS, **settings)
        with closing(mm.Loader(pipeline, num_threads=num_threads)) as loader:
            next(iter(loader))
            return {thread.name.partition("_")[0] for thread in threading.enumerate()}

    values = mm.Decode({"txt": str})
    assert "mmstream-prepare" not in threads_of(decode=values)
    assert "mmstream-prepare" in threads_of(decode=values, transforms=(dict,))
    assert "mmstream-prepare" in threads_of(2, decode=values)
