"""Texts about spans of a video or an audio file, and manifests of speech. Step 2 of a conversion.

Spans (spans):

    {"video": "a.mp4", "timestamps": [[0, 4.5], [4, 9]], "sentences": ["...", "..."]}  ActivityNet
    {"video": "a.mp4", "segments": [{"start": 0, "end": 4.5, "caption": "..."}]}
    {"YoutubeID": "x1", "Start_timestamp": "00:00:10.000", "End_timestamp": "00:00:14.000",
     "Caption": "..."}                                                                 InternVid
    {"videoID": "x1", "timestamp": [["0:00:11.3", "0:00:16.8"]], "caption": ["..."]}   Panda-70M
    {"audio_filepath": "a.wav", "offset": 12.5, "duration": 3, "text": "..."}          NeMo
    {"path": "a.opus", "segments": [{"begin_time": 0, "end_time": 2, "text_tn": "..."}]}  GigaSpeech
    {"video_id": "x1", "annotations": [{"segment": [41, 54], "sentence": "..."}]}         YouCook2

The medium is stored once, whole. The spans are ``segments`` in the ``json``:

    {"start_s": 0.0, "end_s": 4.5, "text": "..."}

A row with one span also has its text as caption. A video that is named by its id alone is the file
``ID.mp4`` in the media root.

Speech (speech, lhotse):

    {"audio_filepath": "a.wav", "text": "...", "duration": 3.2}                    NeMo
    {"path": "a.mp3", "sentence": "...", "client_id": "..."}                       Common Voice
    {"audio": ..., "transcript": "...", "begin_time": 401.7, "original_path": "..."}   MLS
    {"id": "c1", "start": 0, "duration": 3.2, "recording": {"sources": [...]},
     "supervisions": [{"start": 0, "duration": 3.2, "text": "..."}]}               Lhotse cuts

A row about a part of a file is a span of it. Hugging Face's MLS and GigaSpeech hold the part
itself; their times are those of the file that it was cut from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from mmstream.converting.draft import Draft, MediaRef, RowError
from mmstream.converting.formats.captions import CAPTION_KEYS, MEDIA_FACTS
from mmstream.converting.formats.fields import (
    MEDIA_KEYS,
    ParsedRow,
    all_media,
    captioned,
    expect,
    first_key,
    is_set,
    kind_by_name,
    make_draft,
    media_of,
    media_ref,
    seconds_of,
    text_of,
    texts_of,
)

VIDEO_ID_KEYS = ("YoutubeID", "videoID", "videoid", "video_id", "vid")
START_KEYS = ("start_s", "start", "begin_time", "start_time", "Start_timestamp", "offset")
END_KEYS = ("end_s", "end", "end_time", "stop", "End_timestamp")
TEXT_KEYS = ("text", "caption", "Caption", "sentence", "text_tn", "label", "transcript")
LIST_KEYS = (("timestamps", "sentences"), ("timestamp", "caption"), ("timestamps", "captions"))
_SPAN_KEYS = frozenset((*START_KEYS, *END_KEYS, *TEXT_KEYS, "duration"))
SPAN_FACTS = frozenset(
    (
        *("duration", "url", "fps", "num_frames", "title", "channel", "format", "aid", "md5"),
        *("source", "subsets", "speaker", "category", "UMT_Score", "Aesthetic_Score"),
        *("matching_score", "desirable_filtering", "shot_boundary_detection", "lang", "language"),
        *("sample_rate", "shard_id"),
    )
)
LHOTSE_FACTS = frozenset(("duration", "channel", "custom", "features"))
WEBVID_FACTS = MEDIA_FACTS | {"videoid", "page_dir", "contentUrl", "chCap"}


def medium_by_id(row: Mapping[str, Any]) -> tuple[MediaRef, str] | None:
    """Return the video that a row names by its id, and the key of the id."""
    key = first_key(row, VIDEO_ID_KEYS)
    if key is None:
        return None
    name = text_of(row[key] if isinstance(row[key], str) else str(row[key]), key)
    return MediaRef("video", name if kind_by_name(name) else f"{name}.mp4"), key


def is_webvid(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has a video by its id or address, and its captions."""
    has_video = medium_by_id(row) is not None or first_key(row, ("contentUrl",)) is not None
    return has_video and first_key(row, ("name", *CAPTION_KEYS)) is not None


def webvid(row: ParsedRow) -> Draft:
    """Return the draft of a video by its id or address, with its captions: WebVid, VATEX."""
    key = first_key(row, ("name", *CAPTION_KEYS))
    url = row.get("contentUrl")
    if isinstance(url, str) and url:
        video: tuple[MediaRef, str] | None = MediaRef("video", url), "contentUrl"
    else:
        video = medium_by_id(row)
    if key is None or video is None:
        raise RowError("expected a video in contentUrl or videoid, and a caption in name")
    row.taken |= {video[1], key}
    return captioned(row, [video[0]], texts_of(row[key], key))


def has_spans(row: Mapping[str, Any]) -> bool:
    """Tell whether a row has texts about spans of one medium."""
    if _segments_key(row) is not None or _list_keys(row) is not None:
        return True
    has_times = first_key(row, START_KEYS) is not None
    return has_times and (first_key(row, END_KEYS) is not None or is_set(row.get("duration")))


def spans(row: ParsedRow) -> Draft:
    """Return the draft of one medium with the texts of its spans."""
    ref = _medium(row)
    list_keys = _list_keys(row)
    segments_key = _segments_key(row)
    if segments_key is not None:
        segments = [
            _segment(expect(item, dict, f"{segments_key}[{i}]"), f"{segments_key}[{i}]: ")
            for i, item in enumerate(row.take(segments_key))
        ]
    elif list_keys is not None:
        segments = _parallel(row, *list_keys)
    else:
        segments = [_segment({k: v for k, v in row.items() if k in _SPAN_KEYS}, "")]
        used = (first_key(row, keys) for keys in (START_KEYS, END_KEYS, TEXT_KEYS))
        row.taken |= {key for key in used if key is not None}
    return _with_segments(row, ref, segments)


def _with_segments(row: ParsedRow, ref: MediaRef, segments: list[dict[str, Any]]) -> Draft:
    """Return the draft of a medium with its ``segments``."""
    if not segments:
        raise RowError("segments is empty")
    texts = (segments[0]["text"],) if len(segments) == 1 else ()
    main = {"captions": list(texts)} if texts else {}
    return make_draft(row, {**main, "segments": segments}, [ref], texts)


def _medium(row: ParsedRow) -> MediaRef:
    refs = all_media(row) or _refs_in_path(row)
    if len(refs) > 1:
        raise RowError(f"{len(refs)} media files; spans need one")
    if refs:
        return refs[0]
    by_id = medium_by_id(row)
    if by_id is None:
        names = ", ".join(MEDIA_KEYS["video"][:2] + MEDIA_KEYS["audio"][:2])
        raise RowError(f"no medium that the spans are of: expected one of {names}")
    row.take(by_id[1])
    return by_id[0]


def _refs_in_path(row: ParsedRow) -> list[MediaRef]:
    """Take the file that a row names as ``path``. Without a known extension it is audio."""
    if not isinstance(row.get("path"), str):
        return []
    path = row.take("path")
    return [media_ref(path, kind_by_name(path) or "audio", "path")]


def _segments_key(row: Mapping[str, Any]) -> str | None:
    """Return the key of a list of objects that are spans with their texts."""
    if isinstance(row.get("segments"), list):
        return "segments"
    annotations = row.get("annotations")
    first = annotations[0] if isinstance(annotations, list) and annotations else None
    return "annotations" if isinstance(first, dict) and "segment" in first else None


def _list_keys(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of two parallel lists, of times and of texts."""
    for times, texts in LIST_KEYS:
        spans, words = row.get(times), row.get(texts)
        if isinstance(spans, list) and isinstance(words, list):
            if spans and isinstance(spans[0], int | float):
                continue  # the times of frames
            return times, texts
    return None


def _parallel(row: ParsedRow, times_key: str, texts_key: str) -> list[dict[str, Any]]:
    times, texts = row.take(times_key), row.take(texts_key)
    if len(times) != len(texts):
        raise RowError(f"{len(times)} {times_key} but {len(texts)} {texts_key}")
    segments = []
    for i, (span, text) in enumerate(zip(times, texts, strict=True)):
        name = f"{times_key}[{i}]"
        if len(expect(span, list, name)) != 2:
            raise RowError(f"{name}: expected [start, end], found {len(span)} items")
        segments.append(_span(span[0], span[1], text_of(text, f"{texts_key}[{i}]"), name))
    return segments


def _segment(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return one span with its text. Its other keys are kept."""
    times = item.get("segment")
    if isinstance(times, list) and len(times) == 2:
        others = {key: value for key, value in item.items() if key != "segment"}
        item = {"start": times[0], "end": times[1], **others}
    text_key, start_key = first_key(item, TEXT_KEYS), first_key(item, START_KEYS)
    if text_key is None or start_key is None:
        wanted = "text" if text_key is None else "start"
        raise RowError(f"{name}no {wanted} among the keys {', '.join(list(item)[:8])[:200]}")
    start = seconds_of(item[start_key], f"{name}{start_key}")
    end_key = first_key(item, (*END_KEYS, "duration"))
    if end_key is None:
        raise RowError(f"{name}no end and no duration")
    end = seconds_of(item[end_key], f"{name}{end_key}")
    end += start if end_key == "duration" else 0
    segment = _span(start, end, text_of(item[text_key], f"{name}{text_key}"), name)
    others = {k: v for k, v in item.items() if k not in (text_key, start_key, end_key)}
    return {**segment, **({} if name == "" else others)}


def _span(start: Any, end: Any, text: str, name: str) -> dict[str, Any]:
    start_s, end_s = seconds_of(start, name), seconds_of(end, name)
    if end_s <= start_s:
        label = name.rstrip(": ") or "span"
        raise RowError(f"{label}: ends at {end_s:g} s, not after its start at {start_s:g} s")
    return {"start_s": round(start_s, 6), "end_s": round(end_s, 6), "text": text}


SPEECH_TEXT_KEYS = (
    *("text", "sentence", "transcript", "transcription", "normalized_text", "text_normalized"),
    "answer",
)
SPEECH_FACTS = MEDIA_FACTS.union(
    (
        *("offset", "taskname", "source_lang", "target_lang", "pnc", "shard_id", "orig_sr"),
        *("up_votes", "down_votes", "accents", "accent", "variant", "locale", "segment"),
        *("sentence_id", "sentence_domain", "chapter_id", "file", "original_path"),
        *("original_full_path", "begin_time", "end_time", "audio_duration", "duration_ms"),
        *("audio_id", "segment_id", "title", "category", "raw_text", "raw_transcription"),
        *("text_original", "path", "is_gold_transcript", "num_samples", "lang_id"),
        "lang_group_id",
    )
)
_NORMALIZED_KEYS = ("normalized_text", "text_normalized", "raw_transcription")
_SOURCE_KEYS = ("original_path", "original_full_path")
"""Where the sound of a row was cut from."""


def is_cut_out(row: Mapping[str, Any]) -> bool:
    """Tell whether a row holds a part of another file, and the times of it there."""
    has_sound = first_key(row, MEDIA_KEYS["audio"]) is not None
    return has_sound and first_key(row, _SOURCE_KEYS) is not None


def is_speech(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is of NeMo's manifests, Common Voice, FLEURS, LibriTTS or VoxPopuli."""
    has_normalized = "audio" in row and first_key(row, _NORMALIZED_KEYS) is not None
    has_path = isinstance(row.get("path"), str) and isinstance(row.get("sentence"), str)
    return "audio_filepath" in row or has_normalized or has_path


def speech(row: ParsedRow) -> Draft:
    """Return the draft of an audio file and what is said in it."""
    refs = media_of(row).get("audio", [])
    if not refs:
        row.taken.clear()  # media of other kinds are kept as they are
        refs = _refs_in_path(row)
    if len(refs) != 1:
        raise RowError(f"{len(refs)} audio files; expected one in audio_filepath, audio or path")
    key = first_key(row, SPEECH_TEXT_KEYS)
    if key is None:
        raise RowError("no text: expected text or sentence")
    return captioned(row, refs, (text_of(row.take(key), key),))


def is_lhotse(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is a cut of Lhotse."""
    return ("recording" in row and "supervisions" in row) or row.get("type") == "MixedCut"


def lhotse(row: ParsedRow) -> Draft:
    """Return the draft of a cut of Lhotse: its recording, and the spans of its supervisions.

    The recording is stored whole. Times of supervisions begin at the cut; those of ``segments``
    begin at the recording.
    """
    if "tracks" in row:
        raise RowError("a mixed cut of Lhotse; save its audio, such as with cut.save_audio")
    ref = _source(expect(row.take("recording"), dict, "recording"))
    start = seconds_of(row.get("start", 0), "start")
    row.taken |= {"start", "type"}
    segments = []
    for i, item in enumerate(expect(row.take("supervisions"), list, "supervisions")):
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
    return _with_segments(row, ref, segments)


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
    return MediaRef("audio", f"data:;base64,{path}" if type_ == "memory" else path)


_SHAR_CUTS = re.compile(r"cuts\.(\d+)\.jsonl(\.\w+)?")
_MANIFEST = re.compile(r"tarred_audio_manifest.*\.json")
_MANIFEST_FOLDER = "sharded_manifests"
"""Where NeMo keeps the manifest of each tar. The tars are beside this folder."""
_SECOND_ROW = re.compile(r"-sub\d+(?=\.\w+$)")
"""NeMo's mark of a second row about one file, which the tar has once, without the mark."""


def names_tars(name: str) -> bool:
    """Tell whether a file of rows has a name that says that the tars beside it hold its media."""
    return bool(_SHAR_CUTS.fullmatch(name) or _MANIFEST.fullmatch(name))


def with_tar(row: dict[str, Any], file: str) -> dict[str, Any]:
    """Return a row with the place of its audio in a tar. Other rows are returned as they are.

    Args:
        row: A parsed row.
        file: Name of its file, which may begin with folders. Tars are in its folder.

    Raises:
        RowError: A cut of Shar whose file has no number.
    """
    recording = row.get("recording")
    if "shard_id" in row:
        return _in_tar_of_nemo(row, PurePosixPath(file))
    if isinstance(recording, dict) and isinstance(recording.get("sources"), list):
        return _in_tar_of_shar(row, recording, PurePosixPath(file))
    return row


def _in_tar_of_nemo(row: dict[str, Any], file: PurePosixPath) -> dict[str, Any]:
    path, shard = row.get("audio_filepath"), row["shard_id"]
    if not isinstance(path, str) or not re.fullmatch(r"\d{1,9}", str(shard)) or ":" in path:
        return row
    folder = file.parent.parent if file.parent.name == _MANIFEST_FOLDER else file.parent
    member = _SECOND_ROW.sub("", path)
    return {**row, "audio_filepath": f"tar://{member}::{folder / f'audio_{shard}.tar'}"}


def _in_tar_of_shar(
    row: dict[str, Any], recording: dict[str, Any], file: PurePosixPath
) -> dict[str, Any]:
    source = recording["sources"][0] if len(recording["sources"]) == 1 else None
    if not isinstance(source, dict) or source.get("type") != "shar":
        return row
    name = _SHAR_CUTS.fullmatch(file.name)
    if name is None:
        raise RowError(
            "a cut of Shar in a file that is not named cuts.NUMBER.jsonl: the number is that of "
            "recording.NUMBER.tar, which holds its sound"
        )
    if not isinstance(row.get("id"), str):
        raise RowError("a cut of Shar without id, by which its sound is named in the tar")
    tar = file.with_name(f"recording.{name[1]}.tar")
    in_tar = {**source, "type": "file", "source": f"tar://{row['id']}.*::{tar}"}
    # The tar holds what the cut holds, and no more: so times of the cut are those of its file.
    return {**row, "start": 0, "recording": {**recording, "sources": [in_tar]}}
