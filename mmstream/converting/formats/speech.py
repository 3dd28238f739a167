"""Manifests of speech corpora. Part of step 2 of a conversion.

    {"audio_filepath": "a.wav", "text": "...", "duration": 3.2}                    NeMo
    {"path": "a.mp3", "sentence": "...", "client_id": "..."}                       Common Voice
    {"audio": ..., "transcript": "...", "begin_time": 401.7, "original_path": "..."}   MLS
    {"id": "c1", "start": 0, "duration": 3.2, "recording": {"sources": [...]},
     "supervisions": [{"start": 0, "duration": 3.2, "text": "..."}]}               Lhotse cuts

A row about a part of a file is a span of it: see `spans`. Hugging Face's MLS and GigaSpeech hold
the part itself; their times are those of the file that it was cut from.
"""

from __future__ import annotations

from typing import Any

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.formats.captions import MEDIA_FACTS
from mmstream.converting.formats.fields import (
    MEDIA_KEYS,
    expect,
    first_key,
    kind_by_name,
    make_draft,
    media_of,
    media_ref,
    seconds_of,
    text_of,
)
from mmstream.converting.formats.spans import spans_draft

SPEECH_TEXT_KEYS = (
    *("text", "sentence", "transcript", "transcription", "normalized_text", "text_normalized"),
    "answer",
)
SPEECH_FACTS = (
    *MEDIA_FACTS,
    *("offset", "taskname", "source_lang", "target_lang", "pnc", "lang", "shard_id", "orig_sr"),
    *("up_votes", "down_votes", "accents", "accent", "variant", "locale", "segment"),
    *("sentence_id", "sentence_domain", "chapter_id", "file", "original_path"),
    *("original_full_path", "begin_time", "end_time", "audio_duration", "duration_ms"),
    *("audio_id", "segment_id", "title", "category", "raw_text", "raw_transcription"),
    *("text_original", "path"),
    *("is_gold_transcript", "num_samples", "lang_id", "lang_group_id"),
)
_NORMALIZED_KEYS = ("normalized_text", "text_normalized", "raw_transcription")
_SOURCE_KEYS = ("original_path", "original_full_path")
"""Where the sound of a row was cut from."""


def is_cut_out(row: dict[str, Any]) -> bool:
    """Tell whether a row holds a part of another file, and the times of it there."""
    has_sound = first_key(row, MEDIA_KEYS["audio"]) is not None
    return has_sound and first_key(row, _SOURCE_KEYS) is not None


def is_speech(row: dict[str, Any]) -> bool:
    """Tell whether a row is of NeMo's manifests, Common Voice, FLEURS, LibriTTS or VoxPopuli."""
    if "audio_filepath" in row:
        return True
    if "audio" in row and first_key(row, _NORMALIZED_KEYS) is not None:
        return True
    return isinstance(row.get("path"), str) and isinstance(row.get("sentence"), str)


def speech(row: dict[str, Any]) -> Draft:
    """Return the draft of an audio file and what is said in it."""
    media, used = media_of(row)
    refs = media.get("audio", [])
    if not refs and isinstance(row.get("path"), str):
        refs, used = (
            [media_ref(row["path"], kind_by_name(row["path"]) or "audio", "path")],
            {"path"},
        )
    if len(refs) != 1:
        raise RowError(f"{len(refs)} audio files; expected one in audio_filepath, audio or path")
    key = first_key(row, SPEECH_TEXT_KEYS)
    if key is None:
        raise RowError("no text: expected text or sentence")
    texts = (text_of(row[key], key),)
    content = {"captions": list(texts)}
    return make_draft(row, content, refs, used | {key}, kept=SPEECH_FACTS, texts=texts)


def lhotse(row: dict[str, Any]) -> Draft:
    """Return the draft of a cut of Lhotse: its recording, and the spans of its supervisions.

    The recording is stored whole. Times of supervisions begin at the cut; those of ``segments``
    begin at the recording.
    """
    if "tracks" in row:
        raise RowError("a mixed cut of Lhotse; save its audio, such as with cut.save_audio")
    recording = expect(row.get("recording"), dict, "recording")
    ref = _source(recording)
    start = seconds_of(row.get("start", 0), "start")
    segments = []
    for i, item in enumerate(expect(row.get("supervisions"), list, "supervisions")):
        name = f"supervisions[{i}]"
        begin = start + seconds_of(expect(item, dict, name).get("start", 0), f"{name}: start")
        length = seconds_of(item.get("duration"), f"{name}: duration")
        if length <= 0:
            raise RowError(f"{name}: has no duration")
        text = text_of(item.get("text"), f"{name}: text")
        others = {key: item[key] for key in ("speaker", "language", "gender") if item.get(key)}
        times = {"start_s": round(begin, 6), "end_s": round(begin + length, 6)}
        segments.append({**times, "text": text, **others})
    if not segments:
        raise RowError("supervisions is empty")
    used = {"recording", "supervisions", "start", "type"}
    return spans_draft(row, ref, segments, used, ("duration", "channel", "custom", "features"))


def _source(recording: dict[str, Any]) -> MediaRef:
    """Return the one audio file of a recording. A source is never a command that is run."""
    sources = expect(recording.get("sources"), list, "recording: sources")
    if len(sources) != 1:
        raise RowError(f"recording: {len(sources)} sources; one file with all channels is needed")
    source = expect(sources[0], dict, "recording: sources[0]")
    type_, value = source.get("type"), source.get("source")
    if type_ not in ("file", "url", "memory"):
        raise RowError(f"recording: a source of type {str(type_)[:40]!r} is not supported")
    path = text_of(value, "recording: source")
    return (
        MediaRef("audio", f"data:;base64,{path}") if type_ == "memory" else MediaRef("audio", path)
    )
