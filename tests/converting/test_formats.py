"""One row of every format, by value. Other values here mean other bytes in every corpus."""

from __future__ import annotations

import json
from itertools import combinations, product

import pytest

from mmstream.converting.draft import Draft, Media, MediaRef, RowError, samples_of
from mmstream.converting.formats import formats
from mmstream.converting.formats.formats import draft_of, recognise

JPG = Media("jpg", b"\xff\xd8\xff")


def text(value):
    return {"type": "text", "text": value}


def medium(kind, index):
    return {"type": kind, "field": index}


def messages_of(row, format=None):
    return [(m["role"], m["content"]) for m in draft_of(row, format).content["messages"]]


@pytest.mark.parametrize("key", ["image", "image_path", "file_name", "images"])
@pytest.mark.parametrize("text_key", ["text", "caption", "captions"])
def test_a_captioned_image_is_recognised_by_any_of_its_keys(key, text_key):
    row = {key: ["a.jpg"] if key == "images" else "a.jpg", text_key: "a cat", "width": 3}
    draft = draft_of(row)
    assert draft.media == (MediaRef("image", "a.jpg"),)
    assert draft.texts == ("a cat",)
    assert draft.content == {
        "id": None,
        "captions": ["a cat"],
        "media_paths": ["a.jpg"],
        "width": 3,
    }


SAMPLES = {
    "a captioned image becomes jpg, txt and json in this order": (
        {"id": 7, "image": "a.jpg", "captions": ["one", "zwei"], "z": {"b": [1, None]}},
        *(None, [JPG], False),
        {
            "k": {
                "jpg": JPG.data,
                "txt": b"one",
                "json": b'{"id":7,"captions":["one","zwei"],"media_paths":["a.jpg"],'
                b'"z":{"b":[1,null]}}',
            }
        },
    ),
    "each caption makes a sample": (
        {"image": "a.jpg", "captions": ["one", "two"]},
        *(None, [JPG], True),
        {
            f"k-{number}": {
                "jpg": JPG.data,
                "txt": text,
                "json": b'{"id":null,"captions":["%s"],"media_paths":["a.jpg"]}' % text,
            }
            for number, text in enumerate((b"one", b"two"))
        },
    ),
    "several images of a caption are numbered": (
        {"images": ["a.jpg", "b.png"], "text": "two"},
        *(None, [JPG, Media("png", b"p")], False),
        {
            "k": {
                "0.jpg": JPG.data,
                "1.png": b"p",
                "txt": b"two",
                "json": b'{"id":null,"captions":["two"],"media_paths":["a.jpg","b.png"]}',
            }
        },
    ),
    "a row of text has its text in txt alone": (
        {"text": " Zürich\n", "url": "u"},
        *(None, [], True),
        {"k": {"txt": " Zürich\n".encode(), "json": b'{"id":null,"url":"u"}'}},
    ),
    "a row of text without other keys is its text alone": (
        {"text": "Zürich"},
        *(None, [], False),
        {"k": {"txt": "Zürich".encode()}},
    ),
    "captions become a text where that is asked for": (
        {"captions": ["a", "b"]},
        *("text", [], False),
        {"k": {"txt": b"a", "json": b'{"id":null,"captions":["a","b"]}'}},
    ),
    "a caption becomes a text without its image where that is asked for": (
        {"image": "x.jpg", "caption": "a"},
        *("text", [], False),
        {"k": {"txt": b"a", "json": b'{"id":null,"image":"x.jpg"}'}},
    ),
    "each caption without media is its text alone": (
        {"captions": ["a", "b"]},
        *("text", [], True),
        {"k-0": {"txt": b"a"}, "k-1": {"txt": b"b"}},
    ),
    "a label becomes cls": (
        {"image": "a.jpg", "label": 3, "label_name": "cat"},
        *(None, [JPG], False),
        {
            "k": {
                "jpg": JPG.data,
                "cls": b"3",
                "json": b'{"id":null,"media_paths":["a.jpg"],"label_name":"cat"}',
            }
        },
    ),
    "a label of digits becomes cls": (
        {"image": "a.jpg", "label": "3"},
        *(None, [JPG], False),
        {"k": {"jpg": JPG.data, "cls": b"3"}},
    ),
    "a picture alone is its bytes alone": (
        {"image": "a.jpg"},
        *(None, [JPG], False),
        {"k": {"jpg": JPG.data}},
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_row_becomes_the_members_of_its_samples_in_their_order(name):
    row, format, media, each, expected = SAMPLES[name]
    samples = dict(samples_of("k", draft_of(row, format), media, each=each))
    assert samples == expected
    assert [list(fields) for fields in samples.values()] == [*map(list, expected.values())]


def test_rows_of_plain_text_are_recognised_as_by_looking_at_all_formats(monkeypatch):
    others = sorted(formats.TEXT_ROW_KEYS - {"text"})
    names = [subset for size in range(5) for subset in combinations(others, size)]
    values = [None, "", "a.jpg", "https://host/a.jpg", 5, True, ["x"], [["x", 1]], {"text": "x"}]
    rows = [
        {"text": text, **dict.fromkeys(subset, value)}
        for subset, text, value in product(names, values, values)
    ]
    quick = [recognise(row) for row in rows]
    monkeypatch.setattr(formats, "TEXT_ROW_KEYS", frozenset())
    assert quick == [recognise(row) for row in rows]


SPAN = {"start_s": 1.0, "end_s": 2.0}
CLIP = {"messages": [{"role": "user", "content": "<video>What?"}], "videos": ["a.mp4"]}
PICTURE = {"messages": [{"role": "user", "content": "<image>What?"}], "images": ["a.jpg"]}
MENTIONS = {"note": "see a.jpg there", "n": 3}
KEPT = {
    "keys that no format reads": (
        {"id": 1, "image": "a.jpg", "text": "t", "score": 5, "chosen": "x"},
        {"score": 5, "row_chosen": "x"},
        ("score", "chosen"),
    ),
    "bytes under an unknown key beside a medium": (
        {"image": "a.jpg", "text": "t", "thumb": {"bytes": b"abc"}},
        {"thumb": {"bytes": "(3 bytes)"}},
        ("thumb",),
    ),
    "the span of a conversation about a video": ({**CLIP, **SPAN}, SPAN, ()),
    "the span of a conversation about an image": (
        {**PICTURE, "start_s": 1.0},
        {"start_s": 1.0},
        ("start_s",),
    ),
    "a key that would hide a canonical one": (
        {"image": "a.jpg", "text": "t", "media_paths": "mine"},
        {"row_media_paths": "mine"},
        ("media_paths",),
    ),
    "an image_id without an id": (
        {"image_id": 5, "image": "a.jpg", "caption": "c"},
        {"id": 5},
        ("image_id",),
    ),
    "an image_id beside an id": (
        {"id": "a", "image_id": 5, "text": "c"},
        {"id": "a", "image_id": 5},
        ("image_id",),
    ),
    "addresses and words beside a text": (
        {"text": "x", "url": "http://host/a.jpg", **MENTIONS},
        MENTIONS,
        ("note", "n"),
    ),
}
"""{what is kept: (a row, a part of its json, the keys that nothing has read)}"""


@pytest.mark.parametrize("name", KEPT)
def test_other_keys_of_a_row_are_kept_in_its_json(name):
    row, kept, unread = KEPT[name]
    draft = draft_of(row)
    assert kept.items() <= draft.content.items()
    assert draft.unread == unread


def test_a_reshared_medium_keeps_its_field_until_it_is_encoded_anew():
    data = b"\x89PNG"
    ref = MediaRef("image", "x/left.png", data, field="left.png")
    draft = Draft({"id": None}, (ref,), fields={"json": b"{ }", "cls": b"3"})
    [(_, fields)] = samples_of("k", draft, [Media("png", data)], each=False)
    assert fields == {"left.png": data, "json": b"{ }", "cls": b"3"}
    [(_, fields)] = samples_of("k", draft, [Media("jpg", b"j")], each=False)
    assert list(fields) == ["left.jpg", "json", "cls"]


def test_content_parts_of_every_dialect_become_one():
    row = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "value": "a.jpg"},
                    {"type": "image_url", "image_url": {"url": "b.jpg", "detail": "low"}},
                    {"type": "image", "image": "c.jpg", "max_pixels": 99},
                    {"type": "image"},
                    {"type": "text", "value": "What?"},
                    {"type": "text", "text": "Now."},
                ],
            },
            {"role": "assistant", "content": "Four.", "weight": 0},
        ],
        "images": ["d.jpg"],
    }
    user, assistant = draft_of(row).content["messages"]
    assert user["content"] == [
        medium("image", 0),
        medium("image", 1),
        {**medium("image", 2), "max_pixels": 99},
        medium("image", 3),
        text("What?"),
        text("Now."),
    ]
    assert [ref.path for ref in draft_of(row).media] == ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    assert assistant == {"role": "assistant", "content": [text("Four.")], "weight": 0}


def test_tool_turns_keep_what_they_carry():
    row = {
        "conversations": [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": '{"name": "g", "arguments": {}}'},
            {"from": "observation", "value": "rain"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        ]
    }
    assert [role for role, _ in messages_of(row)] == ["user", "assistant", "tool", "assistant"]
    last = draft_of(row).content["messages"][-1]
    assert last == {"role": "assistant", "content": [], "tool_calls": [{"name": "f"}]}


def test_the_fields_of_media_parts_are_named_by_what_the_files_are():
    row = {"input": "<img>a.jpg</img><img>b.jpg</img>?", "output": "x"}
    [(_, fields)] = samples_of(
        "k", draft_of(row), [Media("png", b"p"), Media("webp", b"w")], each=True
    )
    content = json.loads(fields["json"])["messages"][0]["content"]
    assert [part.get("field") for part in content] == ["0.png", "1.webp", None]
    assert list(fields) == ["0.png", "1.webp", "json"]


def test_a_row_of_thirty_images_is_fine_and_a_thousand_and_one_are_not():
    row = {"images": [f"{i}.jpg" for i in range(30)], "text": "many"}
    assert len(draft_of(row).media) == 30
    with pytest.raises(RowError, match="1001 media files in one row, the limit is 1000"):
        draft_of({"images": ["a.jpg"] * 1001, "text": "too many"})


def test_a_named_format_overrules_what_the_keys_say():
    row = {"text": "t", "image": "a.jpg"}
    assert draft_of(row, "text").media == ()
    with pytest.raises(RowError, match="no messages in the row"):
        draft_of(row, "messages")


def turn(content, role="user"):
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "row: expected an object, found a list"),
        (None, "row: expected an object, found null"),
        ({}, "empty row"),
        ({"a": 1, "b": 2}, "no known format has the keys a, b"),
        ({"text": ""}, "text is empty"),
        ({"text": 5}, "text: expected a string, found a number"),
        (
            {"image": "a.jpg", "sentences": ["the cat", "a cat"]},
            "if sentences is the text, say --map text=sentences",
        ),
        ({"image": "a.jpg", "alt": "cat"}, "if alt is the text, say --map text=alt"),
        ({"image": "a.jpg", "words": "a cat"}, "if words is the text, .*else --format labels"),
        (
            {"caption": "c"},
            "no media: expected a path in image.*; for captions alone, say --format",
        ),
        ({"text": ["a"]}, "text: expected a string, found a list"),
        ({"image": 5, "text": "t"}, "image: expected a path or a list of paths, found a number"),
        ({"images": ["a", None], "text": "t"}, r"images\[1\]: expected a string, found null"),
        ({"image": "a", "captions": []}, "captions is empty"),
        ({"image": "a", "captions": ["x", " "]}, r"captions\[1\] is empty"),
        ({"image": "a", "caption": True}, "caption: expected a string, found a boolean"),
        ({"messages": {}}, "messages: expected a list, found an object"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hi"]}, "turn 1: expected an object, found a string"),
        ({"conversations": [{"value": "x"}]}, "turn 1: from: expected a string, found null"),
        (turn("hi", role="narrator"), "turn 1: unknown role 'narrator'"),
        (turn(5), "turn 1: content: expected a string, found a number"),
        (turn(""), "every turn is empty"),
        (turn([{"text": "no type"}]), "turn 1, part 1: type: expected a string, found null"),
        (turn([{"type": "text"}]), "turn 1, part 1: value: expected a string, found null"),
        (turn([{"type": "pdf"}]), "parts of type 'pdf' are not supported"),
        (turn([{"type": "image", "image": 3}]), "part 1: image: expected a string, found a number"),
        ({**turn("<image><image><image>"), "images": ["a", "b"]}, "3 <image> tokens but 2 image"),
        (turn("<video>"), "1 <video> tokens but 0 video files"),
        ({**turn("<image>"), "images": ["a", "b"]}, "1 <image> tokens but 2 image files"),
        ({"input": "q", "output": ""}, "output is empty"),
        ({"input": "q", "output": ["a"]}, "output: expected a string, found a list"),
        ({"input": "q", "output": "a", "history": [["q"]]}, r"history\[0\]: expected \[question"),
        # a media file under an unknown key is not dropped in silence
        *(
            ({**row, "text": "x"}, "no format reads this key")
            for row in (
                *({"pic": "0.jpg"}, {"sound": "a/b.WAV"}, {"photo": b"\xff\xd8"}),
                *(
                    {"photo": path}
                    for path in ("Sommer 2024\\Ä 0.JPG", "file:///my pictures/a.heic")
                ),
                *(
                    {"photo": {"bytes": b"\xff\xd8", "path": None}},
                    {"a": "data:image/png;base64,A"},
                ),
            )
        ),
        ({**turn("x"), "imgs": ["0.png"]}, "no format reads this key"),
        # and is named, with the kind that it seems to be, where the row has no other known key
        *(
            (
                {"note": 1, "pic": medium},
                rf"the keys note, pic; pic looks .*: say --map {kind}=pic$",
            )
            for medium, kind in (
                *(({"bytes": b"\xff\xd8", "path": None}, "image"), (b"\xff\xd8", "image")),
                *(("my a.jpg", "image"), ("a.wav", "audio"), ("b.MP4", "video")),
                ({"bytes": b"x", "path": "c.flac"}, "audio"),
                *((f"data:{kind}/x;base64,AAAA", kind) for kind in ("audio", "video")),
            )
        ),
    ],
)
def test_a_row_that_cannot_become_a_sample_says_why(row, reason):
    with pytest.raises(RowError, match=reason):
        draft_of(row)
