"""`processor_collate` with every processor of transformers that can be built without a download."""

from __future__ import annotations

import inspect
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmstream as mm
from mmstream.errors import BadSampleLimitError, ConfigError
from tests.helpers.all_processors import processors
from tests.helpers.chats import assistant, user
from tests.helpers.corpora import jpeg, write_corpus
from tests.helpers.media_files import audio_file

Fields = dict[str, Any]

PICTURES = [jpeg(1, (250, 260)), jpeg(2, (280, 230))]
SOUNDS = [audio_file(seconds=1.0), audio_file(seconds=1.5)]
ANSWERS = ["a cat", "a dog on a mat"]


def dataset_of(folder: Path, media: tuple[str, ...], is_chat: bool, has_text: bool) -> mm.Dataset:
    """Two samples with one medium of each kind, and a conversation or a text."""

    def sample(number: int) -> dict[str, bytes]:
        files = {"image": ("jpg", PICTURES), "audio": ("wav", SOUNDS)}
        fields = {files[kind][0]: files[kind][1][number] for kind in media}
        fields["cls"] = b"3"
        if is_chat:
            content = [*({"type": kind} for kind in media), {"type": "text", "text": "what?"}]
            messages = [user(content), assistant(ANSWERS[number])]
            fields["json"] = json.dumps({"messages": messages}).encode()
        elif has_text:
            fields["txt"] = ANSWERS[number].encode()
        return fields

    path = folder / f"{'-'.join(media)}{is_chat}{has_text}"
    if not path.exists():
        write_corpus(path, [2], sample)
    return mm.open_dataset(str(path))


def by_hand(processor: Any, media: tuple[str, ...], is_chat: bool, has_text: bool) -> Any:
    """What the processor makes of the same two samples, as its page says."""
    rate = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
    pictures = [Image.open(BytesIO(data)).convert("RGB") for data in PICTURES]
    sounds = (
        [mm.AudioDecoder(sample_rate=rate)(data) for data in SOUNDS] if "audio" in media else []
    )
    if is_chat:
        chats = []
        for number in range(2):
            parts = {"image": pictures, "audio": sounds}
            content = [{"type": kind, kind: parts[kind][number]} for kind in media]
            content.append({"type": "text", "text": "what?"})
            answer = [{"type": "text", "text": ANSWERS[number]}]
            chats.append([user(content), assistant(answer)])
        return processor.apply_chat_template(
            chats,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"text_kwargs": {"padding": True}},
        )
    names = inspect.signature(type(processor).__call__).parameters
    given: Fields = {"images": pictures} if "image" in media else {}
    if "audio" in media:
        given |= {"audio": sounds, "sampling_rate": rate}
        part = getattr(processor, "feature_extractor", None) or processor.audio_processor
        padding = inspect.signature(type(part).__call__).parameters.get("padding")
        if padding is not None and padding.default is False:
            is_open = "text" not in names
            given |= {"padding": True} if is_open else {"audio_kwargs": {"padding": True}}
    if has_text and "text" in names:
        given |= {"text": ANSWERS}
        given |= {"padding": True} if "padding" in names else {"text_kwargs": {"padding": True}}
    return processor(**given, return_tensors="pt")


def outcome(folder: Path, processor: Any) -> str:
    """What becomes of one processor."""
    text: Any = None
    try:
        collate = mm.processor_collate(processor)
    except ConfigError as error:
        if "text=False" not in str(error):
            return f"refused: {error}"
        text = False
        collate = mm.processor_collate(processor, text=False)
    media = tuple(kind for kind in collate.kinds if kind != "video")
    is_chat = bool(getattr(processor, "chat_template", None)) and text is None
    given = (media, is_chat, text is None)
    batch, note = None, ""
    for labels in (True, False):
        pipeline = mm.Pipeline(
            dataset_of(folder, *given),
            global_batch_size=2,
            shuffle=False,
            collate=mm.processor_collate(processor, text=text, labels=labels),
            bad_samples=mm.BadSamplePolicy(quarantine=None),
        )
        try:
            batch = next(iter(mm.Loader(pipeline)))
            break
        except ConfigError as error:
            if "labels=False" not in str(error):
                return f"refused: {error}"
            note = " without labels"
        except BadSampleLimitError as error:
            try:
                by_hand(processor, *given)
            except Exception as own:
                return f"asks for more: {type(own).__name__} {own}"
            return f"FAILED: {error}"
    try:
        expected = dict(by_hand(processor, *given))
    except Exception as error:
        return f"works, and not by hand: {error}{note}"
    assert batch is not None
    for name, value in expected.items():
        if name in ("labels", "is_longer"):  # CLAP draws which recording is called longer
            continue
        if name not in batch:
            return f"DIFFERS: no {name}"
        if isinstance(value, torch.Tensor):
            if batch[name].shape != value.shape:
                return f"DIFFERS: {name} {tuple(batch[name].shape)}, {tuple(value.shape)}"
            if not torch.allclose(batch[name].double(), value.double(), atol=1e-5, equal_nan=True):
                return f"DIFFERS: {name}"
    return f"equal{note}"


@pytest.mark.slow
def test_every_processor_works_or_says_what_it_needs(tmp_path: Path) -> None:
    found = {}
    for name, processor in processors():
        unbuilt = isinstance(processor, Exception)
        found[name] = f"not built: {processor}" if unbuilt else outcome(tmp_path, processor)
    bad = {n: w for n, w in found.items() if w.startswith(("FAILED", "DIFFERS"))}
    assert not bad
    assert sum(words.startswith("equal") for words in found.values()) >= 100
