"""Rows of every format, by value. Other values here mean other bytes in every corpus."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import combinations, product

import pytest
from hypothesis import given, settings, strategies as st

from mmstream.converting.draft import Draft, Media, MediaRef, RowError, samples_of
from mmstream.converting.formats import formats
from mmstream.converting.formats.formats import FORMATS, draft_of, recognise
from tests.helpers.rows import rows_by_format

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
    samples = dict(samples_of("k", draft_of(row, format), media, per_caption=each))
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
    [(_, fields)] = samples_of("k", draft, [Media("png", data)], per_caption=False)
    assert fields == {"left.png": data, "json": b"{ }", "cls": b"3"}
    [(_, fields)] = samples_of("k", draft, [Media("jpg", b"j")], per_caption=False)
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
        "k", draft_of(row), [Media("png", b"p"), Media("webp", b"w")], per_caption=True
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
        ({"messages": [{"content": "x"}]}, "turn 1: role: expected a string, found null"),
        ({"messages": [{"role": "user"}]}, "turn 1: content: expected a string, found null"),
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
        ({"note": 1, "pic": "my a.jpg"}, "the keys note, pic; name the columns with --map"),
    ],
)
def test_a_row_that_cannot_become_a_sample_says_why(row, reason):
    with pytest.raises(RowError, match=reason):
        draft_of(row)


# -- rows of every published corpus, written after its schema, which each case names


HASH = "ab" * 32
BASE64 = "/9j/" + "4AAQSkZJRgABAQAAAQABAAD" * 20


def image(index):
    return medium("image", index)


def part(kind, index=None):
    """Return a part as Hugging Face's trainers write it: ``index`` is that of the picture."""
    return {"type": kind, "text": "?" if kind == "text" else None, "index": index}


def turns(content, key="messages"):
    return [(m["role"], m["content"]) for m in content[key]]


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
OMNICORPUS_FACT = {
    "bytes": 90_112, "d_hash": "f0e1", "height": 480, "width": 640, "unsafe_prob": 0.01
}  # fmt: skip
CONVERSATIONS = {
    # https://huggingface.co/datasets/lmms-lab/LLaVA-Video-178K
    "a video of LLaVA-Video may stand behind its image token": (
        {
            "id": "v1",
            "video": "a/b.mp4",
            "data_source": "0_30_s_academic",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat happens?"},
                {"from": "gpt", "value": "Rain."},
            ],
        },
        [
            ("user", [medium("video", 0), text("What happens?")]),
            ("assistant", [text("Rain.")]),
        ],
        [("video", "a/b.mp4")],
        {"data_source": "0_30_s_academic"},
    ),
    # https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html
    "pairs of human and assistant are turns": (
        {"system": "s", "conversation": [{"human": "hi", "assistant": "hello"}]},
        [("system", [text("s")]), ("user", [text("hi")]), ("assistant", [text("hello")])],
        [],
        {},
    ),
    "query and response have a history": (
        {"query": "<image>b?", "response": "b!", "history": [["a?", "a!"]], "images": ["x.jpg"]},
        [
            ("user", [text("a?")]),
            ("assistant", [text("a!")]),
            ("user", [image(0), text("b?")]),
            ("assistant", [text("b!")]),
        ],
        [("image", "x.jpg")],
        {},
    ),
    # NeMo's multimodal conversations, https://github.com/NVIDIA/NeMo
    "recordings may be turns of their own": (
        {
            "id": "c",
            "conversations": [
                {"from": "User", "value": "What is said?", "type": "text"},
                {"from": "User", "value": "a.wav", "type": "audio", "duration": 1.5},
                {"from": "Assistant", "value": "Good morning.", "type": "text"},
            ],
        },
        [
            ("user", [text("What is said?"), {**medium("audio", 0), "duration": 1.5}]),
            ("assistant", [text("Good morning.")]),
        ],
        [("audio", "a.wav")],
        {},
    ),
    "turns of text with a type may have tokens": (
        {
            "image": "a.jpg",
            "conversations": [{"from": "human", "value": "<image>\nWhat?", "type": "text"}],
        },
        [("user", [image(0), text("What?")])],
        [("image", "a.jpg")],
        {},
    ),
    # https://huggingface.co/docs/trl/dataset_formats (prompt-completion)
    "a prompt and its completion are messages": (
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        [("user", [text("hi")]), ("assistant", [text("hello")])],
        [],
        {},
    ),
    # https://huggingface.co/datasets/HuggingFaceM4/OBELICS
    "OBELICS interleaves texts and images and counts those that are null": (
        {
            "images": ["https://h/a.jpg", None, None, "https://h/b.jpg"],
            "texts": [None, "one", None, None],
            "metadata": "[]",
            "general_metadata": "{}",
        },
        [("assistant", [image(0), text("one"), image(1)])],
        [("image", "https://h/a.jpg"), ("image", "https://h/b.jpg")],
        {"num_missing_images": 1},
    ),
    # https://huggingface.co/datasets/OpenGVLab/OmniCorpus-CC-210M, as Parquet gives it back
    "OmniCorpus is a document with facts about each image": (
        {
            "images": [None, "https://h/a.jpg", None],
            "texts": ["one", None, "two"],
            "metadata": [None, OMNICORPUS_FACT, None],
            "general_metadata": {"url": "https://h/page", "id": "i", "fluency_prob": 0.9},
        },
        [("assistant", [text("one"), image(0), text("two")])],
        [("image", "https://h/a.jpg")],
        {"metadata": [None, OMNICORPUS_FACT, None]},
    ),
    "several questions about a picture are turns": (
        {"image": "a.jpg", "qa_pairs": [{"question": q, "answer": q + "!"} for q in "ab"]},
        [
            ("user", [image(0), text("a")]),
            ("assistant", [text("a!")]),
            ("user", [text("b")]),
            ("assistant", [text("b!")]),
        ],
        [("image", "a.jpg")],
        {},
    ),
    # https://huggingface.co/datasets/howard-hou/OCR-VQA
    "lists of questions and answers are turns": (
        {"image": "a.jpg", "questions": ["Who?", "What?"], "answers": ["Me.", ["a", "b", "b"]]},
        [
            ("user", [image(0), text("Who?")]),
            ("assistant", [text("Me.")]),
            ("user", [text("What?")]),
            ("assistant", [text("b")]),
        ],
        [("image", "a.jpg")],
        {},
    ),
    # https://huggingface.co/datasets/OpenGVLab/VideoChat2-IT
    "questions of VideoChat begin with their instruction and keep the rest": (
        {
            "video": "a.mp4",
            "QA": [
                {"i": "Be short.", "q": "Who?", "a": "A cat.", "t": 3},
                {"i": "", "q": "?", "a": "!"},
            ],
        },
        [
            ("user", [medium("video", 0), text("Be short.\nWho?")]),
            ("assistant", [text("A cat.")]),
            ("user", [text("?")]),
            ("assistant", [text("!")]),
        ],
        [("video", "a.mp4")],
        {"QA": [{"t": 3}, {}]},
    ),
    "Qwen-VL with one picture keeps its label": (
        {"input": "Picture 1:<img>a b.jpg</img>\nWhat is it?", "output": "A cat.", "source": "s"},
        [
            ("user", [text("Picture 1:"), image(0), text("What is it?")]),
            ("assistant", [text("A cat.")]),
        ],
        [("image", "a b.jpg")],
        {"id": None, "media_paths": ["a b.jpg"], "source": "s"},
    ),
    "a part's index says which picture it is": (
        {
            "images": ["a.jpg", "b.jpg"],
            "messages": [
                {"role": "user", "content": [part("image", 1), part("text"), part("image", 0)]},
                {"role": "assistant", "content": [part("text"), part("image", 1)]},
            ],
        },
        [("user", [image(0), text("?"), image(1)]), ("assistant", [text("?"), image(2)])],
        [("image", "b.jpg"), ("image", "a.jpg"), ("image", "b.jpg")],
        {"id": None, "media_paths": ["b.jpg", "a.jpg", "b.jpg"]},
    ),
    "where texts have an index too it is the order of the parts": (
        {
            "images": ["a.jpg"],
            "messages": [{"role": "user", "content": [part("text", 7), part("image", 0)]}],
        },
        [("user", [image(0), text("?")])],
        [("image", "a.jpg")],
        {"id": None, "media_paths": ["a.jpg"]},
    ),
    "Qwen-VL with several pictures keeps the labels that the question names": (
        {
            "input": "Picture 1:<img>a.jpg</img>\nPicture 2: <img>b.jpg</img>\nIs Picture 2 red?",
            "output": "Yes.",
        },
        [
            (
                "user",
                [
                    *(text("Picture 1:"), image(0), text("Picture 2:"), image(1)),
                    text("Is Picture 2 red?"),
                ],
            ),
            ("assistant", [text("Yes.")]),
        ],
        [("image", "a.jpg"), ("image", "b.jpg")],
        {},
    ),
    "tokens of LLaVA take the images in order": (
        {
            "id": "x",
            "image": ["a.jpg", "b.jpg"],
            "conversations": [
                {"from": "human", "value": "<image>\nWhat?"},
                {"from": "gpt", "value": "A cat.\n"},
                {"from": "human", "value": "And this?\n<image>"},
                {"from": "gpt", "value": "A dog."},
            ],
        },
        [
            ("user", [image(0), text("What?")]),
            ("assistant", [text("A cat.\n")]),
            ("user", [text("And this?"), image(1)]),
            ("assistant", [text("A dog.")]),
        ],
        [("image", "a.jpg"), ("image", "b.jpg")],
        {"id": "x"},
    ),
    "LLaVA without an image is a conversation of text": (
        {"image": None, "conversations": [{"from": "human", "value": "hi"}]},
        [("user", [text("hi")])],
        [],
        {},
    ),
    "messages of LLaMA-Factory mix all kinds of media in order of appearance": (
        {
            "messages": [
                {"role": "user", "content": "<video><audio>What? <image>"},
                {"role": "assistant", "content": "Noise."},
            ],
            "images": ["i.jpg"],
            "audios": ["a.mp3"],
            "videos": ["v.mp4"],
            "system": "Be brief.",
            "tools": "[]",
        },
        [
            ("system", [text("Be brief.")]),
            ("user", [medium("video", 0), medium("audio", 1), text("What?"), image(2)]),
            ("assistant", [text("Noise.")]),
        ],
        [("video", "v.mp4"), ("audio", "a.mp3"), ("image", "i.jpg")],
        {"tools": "[]"},
    ),
    "images that no token asks for come first in the first turn of a user": (
        {"messages": [{"role": "system", "content": "s"}, *CHAT], "images": ["a.jpg", "b.jpg"]},
        [
            ("system", [text("s")]),
            ("user", [image(0), image(1), text("hi")]),
            ("assistant", [text("hello")]),
        ],
        [("image", "a.jpg"), ("image", "b.jpg")],
        {},
    ),
    "rows of instructions join their question and unroll their history": (
        {
            "image": "a.jpg",
            "instruction": "Describe.",
            "input": "In English.",
            "output": "A cat.",
            "history": [["hi", "hello"]],
        },
        [
            ("user", [image(0), text("hi")]),
            ("assistant", [text("hello")]),
            ("user", [text("Describe.\nIn English.")]),
            ("assistant", [text("A cat.")]),
        ],
        [("image", "a.jpg")],
        {},
    ),
    # https://platform.openai.com/docs/api-reference/chat/create
    "parts of OpenAI hold URLs, data URLs and sound": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is it?"},
                        {"type": "image_url", "image_url": {"url": "https://h/a.jpg"}},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
                        {
                            "type": "input_audio",
                            "input_audio": {"data": "UklGRg==", "format": "wav"},
                        },
                    ],
                }
            ]
        },
        [("user", [text("What is it?"), image(0), image(1), medium("audio", 2)])],
        [
            ("image", "https://h/a.jpg"),
            ("image", "data:image/png;base64,iVBO"),
            ("audio", "data:;base64,UklGRg=="),
        ],
        {
            "media_paths": [
                *("https://h/a.jpg", "data:image/png;base64,(26 characters)"),
                "data:;base64,(21 characters)",
            ]
        },
    ),
    # https://huggingface.co/docs/trl/dataset_formats (vision), as Parquet gives it back
    "parts of TRL take the images of their column": (
        {
            "images": [{"bytes": JPG.data, "path": None}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "text": None}, text("What?")],
                    "tool_calls": None,
                },
                {"role": "assistant", "content": [text("A cat.")]},
            ],
        },
        [("user", [image(0), text("What?")]), ("assistant", [text("A cat.")])],
        [("image", "images[0]")],
        {},
    ),
    # https://huggingface.co/datasets/HuggingFaceM4/FineVision
    "The Cauldron and FineVision have texts of user and assistant": (
        {
            "images": [{"bytes": JPG.data, "path": "a.jpg"}, {"bytes": JPG.data, "path": None}],
            "texts": [
                {"user": "What?", "assistant": "A.", "source": "AI2D"},
                {"user": "Why?", "assistant": "B."},
            ],
            "source": "ai2d",
            "relevance_ratings": [5, 4],
        },
        [
            ("user", [image(0), image(1), text("What?")]),
            ("assistant", [text("A.")]),
            ("user", [text("Why?")]),
            ("assistant", [text("B.")]),
        ],
        [("image", "a.jpg"), ("image", "images[1]")],
        {"relevance_ratings": [5, 4], "texts": [{"source": "AI2D"}, {}]},
    ),
    # https://huggingface.co/datasets/MMInstruction/M3IT
    "base64 is a medium, and never text of the json": (
        {
            "instruction": "Describe.",
            "inputs": "",
            "image_base64_str": [BASE64],
            "outputs": "A cat.",
        },
        [("user", [image(0), text("Describe.")]), ("assistant", [text("A cat.")])],
        [("image", f"data:;base64,{BASE64}")],
        {"media_paths": [f"data:;base64,({13 + len(BASE64)} characters)"]},
    ),
    "row of GQA without its image, where the format is named": (
        {"question": "What?", "answer": "cat", "image": None},
        [("user", [text("What?")]), ("assistant", [text("cat")])],
        [],
        {},
    ),
}
"""{what holds: (a row, its turns, its media, what else stands in its json)}"""


@pytest.mark.parametrize(
    ("row", "expected", "media", "kept"), CONVERSATIONS.values(), ids=list(CONVERSATIONS)
)
def test_conversations_of_every_dialect_become_turns(row, expected, media, kept):
    draft = draft_of(row)
    assert turns(draft.content) == expected
    assert [(ref.kind, ref.path) for ref in draft.media] == media
    assert kept.items() <= draft.content.items()
    assert draft.unread == ()


MMC4 = {
    "text_list": ["one", "two"],
    "image_info": [
        {"image_name": "b.jpg", "raw_url": "https://h/b", "matched_text_index": 1},
        {"image_name": "a.jpg", "raw_url": "https://h/a", "matched_text_index": 0},
    ],
    "similarity_matrix": [],
    "url": "u",
}
BEFORE = [("assistant", [image(0), text("one"), image(1), text("two")])]
AFTER = [("assistant", [text("one"), image(0), text("two"), image(1)])]
URLS = [("image", "https://h/a"), ("image", "https://h/b")]
NAMES = [("image", "a.jpg"), ("image", "b.jpg")]
ULTRAFEEDBACK = {"messages": CHAT, "chosen": CHAT, "rejected": CHAT, "prompt": "hi"}
LLAVA_VIDEO = CONVERSATIONS["a video of LLaVA-Video may stand behind its image token"]


@pytest.mark.parametrize(
    ("format", "row", "expected", "media", "unread"),
    [
        # https://github.com/allenai/mmc4: each image is beside the text that it matches
        (None, MMC4, BEFORE, URLS, ()),
        ("mmc4-files", MMC4, BEFORE, NAMES, ()),
        ("mmc4-after", MMC4, AFTER, URLS, ()),
        ("mmc4-files-after", MMC4, AFTER, NAMES, ()),
        # https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized: it is trained whole
        (
            None,
            ULTRAFEEDBACK,
            [("user", [text("hi")]), ("assistant", [text("hello")])],
            [],
            ("chosen", "rejected", "prompt"),
        ),
        ("preference", ULTRAFEEDBACK, [("user", [text("hi")])], [], ("prompt",)),
        ("llava", *LLAVA_VIDEO[:3], ()),
        # https://cs.stanford.edu/people/dorarad/gqa: ``imageId`` alone names the picture
        (
            "vqa",
            {"question": "What?", "answer": "cat", "imageId": "n1"},
            [("user", [text("What?")]), ("assistant", [text("cat")])],
            [],
            ("imageId",),
        ),
    ],
)
def test_a_format_may_be_named(format, row, expected, media, unread):
    draft = draft_of(row, format)
    assert turns(draft.content) == expected
    assert [(ref.kind, ref.path) for ref in draft.media] == media
    assert draft.unread == unread


GROUNDING = {
    "messages": [
        {"role": "user", "content": "<image>Find <ref-object>, please."},
        {"role": "assistant", "content": "Here: <bbox> and <bbox>."},
    ],
    "images": ["x.jpg"],
    "objects": {"ref": ["the sheep"], "bbox": [[30, 20, 10, 40.5], [5, 6]]},
}


def test_grounding_keeps_boxes_with_the_meaning_of_their_coordinates():
    """https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (grounding)"""
    draft = draft_of(GROUNDING)
    box = {"type": "bbox", "bbox": [10, 20, 30, 40.5], "unit": "pixels", "field": 0}
    point = {"type": "bbox", "bbox": [5, 6], "unit": "pixels", "field": 0}
    assert turns(draft.content) == [
        ("user", [image(0), text("Find the sheep, please.")]),
        ("assistant", [text("Here: "), box, text(" and "), point, text(".")]),
    ]
    medium = Media("png", b"p", {"width": 10, "original_width": 640, "original_height": 480})
    [(_, fields)] = samples_of("k", draft, [medium], per_caption=False)
    answer = json.loads(fields["json"])["messages"][1]["content"]
    assert answer[1] == {**box, "field": "0.png", "width": 640, "height": 480}
    fractions = {**GROUNDING["objects"], "bbox": [[0.1, 0.2, 0.3, 1], [0, 1]], "bbox_type": "norm1"}
    answer = turns(draft_of({**GROUNDING, "objects": fractions}).content)[1][1]
    assert (answer[1]["unit"], answer[1]["bbox"]) == ("fraction", [0.1, 0.2, 0.3, 1])


def test_a_box_is_of_the_image_that_its_image_id_counts():
    """https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (grounding)"""
    row = {
        "messages": [
            {"role": "user", "content": "<image><video><image>Find the two."},
            {"role": "assistant", "content": "<bbox> and <bbox>"},
        ],
        "images": ["x.jpg", "y.jpg"],
        "videos": ["v.mp4"],
        "objects": {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "image_id": [1, 0]},
    }
    draft = draft_of(row)
    assert [ref.path for ref in draft.media] == ["x.jpg", "v.mp4", "y.jpg"]
    boxes = [part for part in turns(draft.content)[1][1] if part["type"] == "bbox"]
    assert [(box["bbox"], box["field"]) for box in boxes] == [([1, 2, 3, 4], 2), ([5, 6, 7, 8], 0)]
    sizes = [{"original_width": 10 * i, "original_height": i} for i in (1, 2, 3)]
    media = [
        Media(name, b"m", size) for name, size in zip(("jpg", "mp4", "png"), sizes, strict=True)
    ]
    [(_, fields)] = samples_of("k", draft, media, per_caption=False)
    answer = json.loads(fields["json"])["messages"][1]["content"]
    assert [(part["field"], part["width"]) for part in answer if part["type"] == "bbox"] == [
        ("2.png", 30),
        ("0.jpg", 10),
    ]


VQA = {"image": "a.jpg", "question": "What?"}


@pytest.mark.parametrize(
    ("more", "question", "answer"),
    [
        ({"answer": "a cat"}, "What?", "a cat"),
        ({"answer": 3}, "What?", "3"),
        ({"answers": ["dog", "cat", "cat"]}, "What?", "cat"),
        ({"answers": [{"answer": "dog"}, {"answer": "cat"}]}, "What?", "dog"),
        ({"multiple_choice_answer": "cat", "answers": ["dog"]}, "What?", "cat"),
        ({"choices": ["cat", "dog"], "answer": 1}, "What?\nA. cat\nB. dog", "B"),
        ({"options": {"A": "cat", "B": "dog"}, "answer": "A"}, "What?\nA. cat\nB. dog", "A"),
        ({"choices": ["cat", "dog"], "answer": "dog"}, "What?\nA. cat\nB. dog", "B"),
        ({"choices": ["cat", "dog"], "correct_choice_idx": 1}, "What?\nA. cat\nB. dog", "B"),
        ({"question": None, "query": "How many?", "label": ["14"]}, "How many?", "14"),
        ({"question": None, "q": "Who?", "a": "A cat."}, "Who?", "A cat."),
        ({"a0": "cat", "a1": "dog", "answer": "1"}, "What?\nA. cat\nB. dog", "B"),
        ({"A": "cat", "B": "dog", "C": "", "answer": "A"}, "What?\nA. cat\nB. dog", "A"),
        ({"choices": ["3", "1"], "answer": "1"}, "What?\nA. 3\nB. 1", "B"),
        ({"choice_a": "cat", "choice_b": 2, "answer": "B"}, "What?\nA. cat\nB. 2", "B"),
        ({"A": "cat", "answer": "A"}, "What?", "A"),
        ({"choices": ["cat", "dog"], "answer": " 1"}, "What?\nA. cat\nB. dog", "B"),
        ({"choices": ["cat", "dog"], "answer": 1.0}, "What?\nA. cat\nB. dog", "B"),
        ({"choices": ["cat", "dog"], "answer": "1.0"}, "What?\nA. cat\nB. dog", "B"),
        ({"choices": ["cat", "dog"], "answer": "(b)"}, "What?\nA. cat\nB. dog", "B"),
        ({"choices": ["cat", "dog"], "answers": ["a cat"]}, "What?\nA. cat\nB. dog", "a cat"),
        ({"choices": ["0", "1"], "answer": 0}, "What?\nA. 0\nB. 1", "A"),
        ({"choices": [0.5, 1.5], "answer": 1.5}, "What?\nA. 0.5\nB. 1.5", "B"),
        ({"choices": ["2", "3"], "correct_choice_idx": "1"}, "What?\nA. 2\nB. 3", "B"),
        ({"a0": "1", "a1": "3", "answer": "1"}, "What?\nA. 1\nB. 3", "B"),
        ({"a0": "1", "a1": "3", "answer": "3"}, "What?\nA. 1\nB. 3", "B"),
        ({"options": "['cat', 'a \"dog\"']", "answer": "B"}, 'What?\nA. cat\nB. a "dog"', "B"),
        ({"options": {"1": "cat", "2": "dog"}, "answer": "1"}, "What?\n1. cat\n2. dog", "1"),
        *(
            ({"choices": ["cat", "dog"], "answer": answer}, "What?\nA. cat\nB. dog", "B")
            for answer in ("B. dog", "(B) dog", "B: dog", "(b)", "dog", 1)
        ),
    ],
)
def test_questions_about_pictures_have_one_answer(more, question, answer):
    """https://huggingface.co/datasets: HuggingFaceM4/VQAv2, derek-thomas/ScienceQA,
    HuggingFaceM4/A-OKVQA, HuggingFaceM4/ChartQA, lmms-lab/NExTQA, lmms-lab/MMBench"""
    draft = draft_of({**VQA, **more})
    assert turns(draft.content) == [
        ("user", [image(0), text(question)]),
        ("assistant", [text(answer)]),
    ]
    assert draft.unread == (("A",) if "A" in more and "B" not in more else ())
    assert draft.content.get("answers") == more.get("answers")


USER = {"role": "user", "content": "?"}
GOOD, BAD = ({"role": "assistant", "content": content} for content in "+-")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "chosen": "+", "rejected": "-"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "chosen": "\n\nHuman: ?\n\nAssistant: +",
            "rejected": "\n\nHuman: ?\n\nAssistant: -",
        },
        {
            "conversations": [{"from": "human", "value": "?"}],
            "chosen": {"from": "gpt", "value": "+"},
            "rejected": {"from": "gpt", "value": "-"},
        },
        {"instruction": "?", "input": "", "chosen": "+", "rejected": "-"},
        {"messages": [USER, GOOD], "rejected_response": "-"},
        {"question": "?", "chosen": "+", "rejected": "-"},
    ],
)
def test_pairs_of_every_dialect_become_one(row):
    """TRL and ms-swift as above; https://github.com/hiyouga/LLaMA-Factory/tree/main/data;
    https://huggingface.co/datasets/Anthropic/hh-rlhf; https://huggingface.co/datasets/openbmb/RLAIF-V-Dataset
    """
    draft = draft_of({**row, "images": ["a.jpg"]})
    assert turns(draft.content) == [("user", [image(0), text("?")])]
    assert turns(draft.content, "chosen") == [("assistant", [text("+")])]
    assert turns(draft.content, "rejected") == [("assistant", [text("-")])]
    assert draft.unread == ()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "completion": "+", "label": True},
        {"instruction": "?", "output": "+", "kto_tag": True},
        {"messages": [USER, GOOD], "label": True},
        {"messages": [USER, GOOD], "kto_tag": True},
    ],
)
def test_an_answer_with_a_verdict_is_no_answer_to_imitate(row):
    """KTO, as TRL, LLaMA-Factory and ms-swift write it"""
    content = draft_of(row).content
    assert turns(content) == [("user", [text("?")])]
    assert turns(content, "completion") == [("assistant", [text("+")])]
    assert content["label"] is True


SEGMENT = {"start_s": 1.5, "end_s": 4.0, "text": "said"}
CANARY = {
    "source_lang": "en",
    "target_lang": "de",
    "taskname": "asr",
    "pnc": "yes",
    "lang": "en",
    "orig_sr": 48000,
}
SOUND = {"audio": {"bytes": b"RIFF", "path": "1.wav"}}
MEDIA_WITH_TEXTS = {
    # https://huggingface.co/datasets/MBZUAI/VideoInstruct-100K
    "an id of a video names a file": (
        {"q": "Who?", "a": "A cat.", "video_id": "v_x1"},
        [MediaRef("video", "v_x1.mp4")],
        (),
        {"video_id": "v_x1"},
    ),
    "a file name of a picture beside a sound": (
        {"audio": "1.wav", "file_name": "a.jpg", "caption": "Rain."},
        [MediaRef("image", "a.jpg"), MediaRef("audio", "1.wav")],
        ("Rain.",),
        {},
    ),
    # https://zenodo.org/record/4783391: Clotho
    "numbered captions are captions in their order": (
        {"file_name": "a.wav", "caption_2": "b", "caption_10": "c", "caption_1": "a"},
        [MediaRef("audio", "a.wav")],
        ("a", "b", "c"),
        {},
    ),
    # https://cs.stanford.edu/people/karpathy/deepimagesent
    "sentences of Karpathy are captions": (
        {
            "filename": "a.jpg",
            "filepath": "val2014",
            "sentences": [{"raw": "A man.", "tokens": ["a", "man"], "sentid": 1}, {"raw": "B."}],
            "split": "restval",
        },
        [MediaRef("image", "val2014/a.jpg")],
        ("A man.", "B."),
        {"split": "restval"},
    ),
    "sentences of Karpathy without a folder": (
        {"filename": "a.jpg", "filepath": None, "sentences": [{"raw": "A man."}]},
        [MediaRef("image", "a.jpg")],
        ("A man.",),
        {},
    ),
    # https://huggingface.co/datasets: facebook/voxpopuli, google/fleurs, and LibriTTS
    "VoxPopuli": (
        {**SOUND, "normalized_text": "one", "raw_text": "1"},
        [MediaRef("audio", "1.wav", b"RIFF")],
        ("one",),
        {},
    ),
    "LibriTTS": (
        {**SOUND, "text_normalized": "one", "text_original": "1", "path": "/tmp/1.wav"},
        [MediaRef("audio", "1.wav", b"RIFF")],
        ("one",),
        {},
    ),
    "FLEURS": (
        {**SOUND, "transcription": "one", "raw_transcription": "1", "num_samples": 5},
        [MediaRef("audio", "1.wav", b"RIFF")],
        ("one",),
        {},
    ),
    # https://huggingface.co/datasets/allenai/c4
    "text of the web with its address stays text": (
        {"text": "x", "timestamp": "2019", "url": "https://host/page"},
        [],
        ("x",),
        {},
    ),
    # LAION-5B
    "LAION": (
        {"URL": "https://h/a", "TEXT": "a cat", "WIDTH": 9, "HEIGHT": 9, "similarity": 0.3},
        [MediaRef("image", "https://h/a")],
        ("a cat",),
        {},
    ),
    # https://huggingface.co/datasets/mlfoundations/datacomp_1b
    "DataComp": (
        {"url": "https://h/a", "text": "a cat", "uid": "u", "sha256": HASH, "face_bboxes": []},
        [MediaRef("image", "https://h/a", None, HASH)],
        ("a cat",),
        {},
    ),
    "CC12M": (
        {"url": "https://h/a", "caption": "a cat"},
        [MediaRef("image", "https://h/a")],
        ("a cat",),
        {},
    ),
    "cc2dataset": (
        {"url": "https://h/a", "alt": "a cat", "uid": "u"},
        [MediaRef("image", "https://h/a")],
        ("a cat",),
        {},
    ),
    "a picture of the web by its ending": (
        {"url": "https://h/a.jpg", "text": "a cat"},
        [MediaRef("image", "https://h/a.jpg")],
        ("a cat",),
        {},
    ),
    # https://docs.nvidia.com/nemo-framework/user-guide/latest/nemotoolkit/asr/datasets.html
    "NeMo": (
        {"audio_filepath": "a.wav", "text": "said", "duration": 2.5},
        [MediaRef("audio", "a.wav")],
        ("said",),
        {},
    ),
    "NeMo with a span": (
        {"audio_filepath": "a.wav", "text": "said", "duration": 2.5, "offset": 1.5},
        [MediaRef("audio", "a.wav")],
        ("said",),
        {"segments": [SEGMENT]},
    ),
    "NeMo, Canary: the languages and the task stand beside the text": (
        {"audio_filepath": "a.wav", "text": "said", "duration": 2.5, **CANARY},
        [MediaRef("audio", "a.wav")],
        ("said",),
        CANARY,
    ),
    "NeMo, SALM: the answer stands under a name of its own": (
        {"audio_filepath": "a.wav", "answer": "said", "duration": 2.5},
        [MediaRef("audio", "a.wav")],
        ("said",),
        {},
    ),
    # https://commonvoice.mozilla.org
    "Common Voice": (
        {"client_id": "c", "path": "a.mp3", "sentence": "said", "up_votes": "2"},
        [MediaRef("audio", "a.mp3")],
        ("said",),
        {},
    ),
    # https://lhotse.readthedocs.io/en/latest/cuts.html
    "Lhotse": (
        {
            "id": "c1",
            "start": 1.0,
            "duration": 5.0,
            "channel": 0,
            "type": "MonoCut",
            "recording": {"sources": [{"type": "file", "channels": [0], "source": "a.flac"}]},
            "supervisions": [{"start": 0.5, "duration": 2.5, "text": "said", "speaker": "s"}],
        },
        [MediaRef("audio", "a.flac")],
        ("said",),
        {"segments": [{**SEGMENT, "speaker": "s"}]},
    ),
    # https://github.com/SpeechColab/GigaSpeech
    "GigaSpeech": (
        {
            "aid": "POD1",
            "path": "a.opus",
            "md5": "x",
            "segments": [{"sid": "s", "begin_time": 1.5, "end_time": 4.0, "text_tn": "said"}],
        },
        [MediaRef("audio", "a.opus")],
        ("said",),
        {"segments": [{**SEGMENT, "sid": "s"}]},
    ),
    # https://huggingface.co/datasets: facebook/multilingual_librispeech, speechcolab/gigaspeech
    "times in a book are not a span of the part that was cut out": (
        {**SOUND, "transcript": "a", "begin_time": 401.7, "end_time": 417.5, "original_path": "b"},
        [MediaRef("audio", "1.wav", b"RIFF")],
        ("a",),
        {"begin_time": 401.7},
    ),
    "times in a file are not a span of the part that was cut out": (
        {**SOUND, "transcript": "a", "begin_time": 401.7, "original_full_path": "book.mp3"},
        [MediaRef("audio", "1.wav", b"RIFF")],
        ("a",),
        {"begin_time": 401.7},
    ),
    # https://github.com/m-bain/webvid
    "WebVid": (
        {"videoid": "1", "contentUrl": "https://h/1.mp4", "name": "said"},
        [MediaRef("video", "https://h/1.mp4")],
        ("said",),
        {},
    ),
    # https://huggingface.co/datasets/OpenGVLab/InternVid
    "InternVid": (
        {
            "YoutubeID": "x1",
            "Start_timestamp": "00:00:01.500",
            "End_timestamp": "00:00:04.000",
            "Caption": "said",
        },
        [MediaRef("video", "x1.mp4")],
        ("said",),
        {"segments": [SEGMENT]},
    ),
    # https://github.com/snap-research/Panda-70M
    "Panda-70M": (
        {
            "videoID": "x1",
            "url": "https://youtube/x1",
            "timestamp": [["0:00:01.5", "0:00:04"], ["0:00:05", "0:00:06"]],
            "caption": ["said", "more"],
            "matching_score": [0.5, 0.4],
        },
        [MediaRef("video", "x1.mp4")],
        (),
        {"segments": [SEGMENT, {"start_s": 5.0, "end_s": 6.0, "text": "more"}]},
    ),
    # https://github.com/NJU-PCALab/OpenVid-1M
    "OpenVid": (
        {"video": "x1.mp4", "caption": "said", "fps": "30"},
        [MediaRef("video", "x1.mp4")],
        ("said",),
        {},
    ),
    # https://cs.stanford.edu/people/ranjaykrishna/densevid
    "ActivityNet Captions": (
        {
            "video": "x1.mp4",
            "duration": 9.0,
            "timestamps": [[1.5, 4.0], [4, 9]],
            "sentences": ["said", "more"],
        },
        [MediaRef("video", "x1.mp4")],
        (),
        {"segments": [SEGMENT, {"start_s": 4.0, "end_s": 9.0, "text": "more"}]},
    ),
    # http://youcook2.eecs.umich.edu and http://activity-net.org
    "an entry of a database of videos": (
        {
            "video_id": "x1",
            "id": "x1",
            "annotations": [{"segment": [1.5, 4], "id": 0, "sentence": "said"}],
            "duration": 60,
        },
        [MediaRef("video", "x1.mp4")],
        ("said",),
        {"segments": [{**SEGMENT, "id": 0}]},
    ),
    "rows about one video, joined by group_spans": (
        {"video": "x1.mp4", "segments": [{"start": "1.5", "end": "4", "caption": "said"}]},
        [MediaRef("video", "x1.mp4")],
        ("said",),
        {"segments": [SEGMENT]},
    ),
    "the address of a page with a video is not a picture": (
        {"video_id": "x1", "url": "https://host/watch", "caption": "A cat runs."},
        [MediaRef("video", "x1.mp4")],
        ("A cat runs.",),
        {},
    ),
    # https://eric-xw.github.io/vatex-website
    "captions of VATEX are those of one language": (
        {"videoID": "v_000122_000132", "enCap": ["one", "two"], "chCap": ["一", "二"]},
        [MediaRef("video", "v_000122_000132.mp4")],
        ("one", "two"),
        {"chCap": ["一", "二"]},
    ),
    # https://huggingface.co/docs/datasets/about_dataset_features
    "a struct of Hugging Face has bytes": (
        {"image": {"bytes": JPG.data, "path": "a.jpg"}, "text": "x"},
        [MediaRef("image", "a.jpg", JPG.data)],
        ("x",),
        {"media_paths": ["a.jpg"]},
    ),
    "or a path": (
        {"audio": {"bytes": None, "path": "a.wav"}, "text": "x"},
        [MediaRef("audio", "a.wav")],
        ("x",),
        {},
    ),
    "bytes alone are named by their key": (
        {"image": JPG.data, "text": "x"},
        [MediaRef("image", "image", JPG.data)],
        ("x",),
        {},
    ),
    "signatures and passwords of URLs are not published": (
        {"URL": "https://me:word@host/a.jpg?w=1&X-Amz-Signature=1f2e", "TEXT": "x"},
        [MediaRef("image", "https://me:word@host/a.jpg?w=1&X-Amz-Signature=1f2e")],
        ("x",),
        {"media_paths": ["https://***@host/a.jpg?w=1&X-Amz-Signature=***"]},
    ),
    "a label in words is a fact": (
        {"image": "a.jpg", "label": "cat"},
        [MediaRef("image", "a.jpg")],
        (),
        {"label": "cat"},
    ),
}
"""{what holds, or a corpus: (a row, its media, its texts, what else stands in its json)}"""


@pytest.mark.parametrize(
    ("row", "media", "texts", "kept"), MEDIA_WITH_TEXTS.values(), ids=list(MEDIA_WITH_TEXTS)
)
def test_media_of_every_corpus_have_their_texts_and_spans(row, media, texts, kept):
    draft = draft_of(row)
    assert (draft.media, draft.texts, draft.unread) == (tuple(media), texts, ())
    assert kept.items() <= draft.content.items()
    assert draft.content.get("segments") == kept.get("segments")


@pytest.mark.parametrize(
    ("row", "media", "text"),
    [
        # https://huggingface.co/datasets/cvssp/WavCaps
        ({"audio": "1.wav", "file_name": "a.wav", "caption": "x"}, ["1.wav"], "x"),
        ({"query": "cat", "label": "1", "text": "A cat."}, [], "A cat."),
    ],
    ids=["a name is not a second sound", "a query with a label is a question with a picture only"],
)
def test_a_row_may_have_keys_that_look_like_media_or_questions(row, media, text):
    draft = draft_of(row)
    assert ([ref.path for ref in draft.media], draft.texts) == (media, (text,))


GQA = {"question": "What?", "answer": "cat", "imageId": "n1"}


def boxes(**objects):
    return {**GROUNDING, "objects": {"ref": ["x"], **objects}}


def lhotse(*sources, supervisions=()):
    return {"id": "c", "recording": {"sources": [*sources]}, "supervisions": [*supervisions]}


def dense(span):
    return {"video": "a.mp4", "timestamps": [span], "sentences": ["x"]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        # boxes that fit no token or image
        (boxes(bbox=[[1, 2, 3, 4]]), "2 <bbox> tokens but 1 of them"),
        (boxes(bbox=[[1, 2, 3], [1, 2]]), r"bbox\[0\]: expected 2 or 4 numbers, found 3"),
        (boxes(bbox=[[1, "x"], [1, 2]]), r"bbox\[0\]: expected a number, found 'x'"),
        (boxes(bbox=[[1, 2], [1, 2]], bbox_type="norm7"), "bbox_type 'norm7' is neither"),
        (boxes(bbox=[[1, 2], [1, 2]], image_id=[0, 1]), r"bbox\[1\]: of image 1, the row has 1"),
        (boxes(bbox=[[1, 2], [1, 2]], ref=[]), "1 <ref-object> tokens but 0 of them"),
        # answers that name no choice
        (
            {**VQA, "choices": ["2", "3", "5"], "answer": "1"},
            "answer: 1 is not a choice, and not an index where choices are numbers",
        ),
        (
            {**VQA, "choices": ["cat", "dog"], "answer": "bear"},
            "answer: bear is neither a choice nor the letter of one",
        ),
        (
            {**VQA, "choices": ["cat", "dog"], "answer": 0.5},
            "answer: 0.5 is neither a choice nor the letter of one",
        ),
        ({**VQA, "choices": ["cat", "dog"], "answer": -1}, "answer: -1, and there are 2 choices"),
        ({**VQA, "a0": "cat", "a1": "dog", "answer": "2"}, "answer: 2, and there are 2 choices"),
        (
            {**VQA, "A": "cat", "B": "dog", "C": "", "D": "bear", "answer": "D"},
            "D: a choice, and one before it is empty",
        ),
        # questions without their picture, or without an answer
        (
            {"image": "a.jpg", "questions": ["Who?", "What?"], "answers": ["x"]},
            "a question and no answer",
        ),
        (GQA, r"imageId: n1 is an id of a picture.*--format vqa"),
        (
            {"image": "a.jpg", "question": "What does it say?", "caption_str": ["a", "b"]},
            "a question and no answer",
        ),
        *(
            ({"image": "a.jpg", **lost}, "a question and no answer, an answer alone, or lists")
            for lost in (
                *({"query": "图片里有什么？"}, {"prompt": "?", "label": True}, {"answer": "yes"}),
                *({"texts": []}, {"qa_pairs": []}, {"questions": [], "answers": []}),
                *({"output": ""}, {"chosen": None, "rejected": None}, {"answer": None}),
            )
        ),
        # indexes of parts that are not those of the pictures
        *(
            ({"images": ["a", "b"], "messages": [{"role": "user", "content": parts}]}, reason)
            for parts, reason in (
                ([part("image", 1), part("image", 2)], "image parts of index 1, 2 for 2 image"),
                ([part("image", 0)], "image parts of index 0 for 2 image files"),
                ([part("image", 0), part("image")], "image parts of index 0, None for 2"),
                ([part("image", "x"), part("image", 0)], "image parts of index x, 0 for 2"),
            )
        ),
        # pairs without a prompt or an answer
        ({"chosen": "+", "rejected": "-"}, "no prompt: expected prompt, messages or question"),
        ({"prompt": "?", "chosen": [], "rejected": "-"}, "chosen is empty"),
        ({"prompt": "?", "chosen": 5, "rejected": "-"}, "chosen: expected a text or turns, found"),
        ({"messages": CHAT[:1], "label": False}, "does not end with an answer"),
        ({"messages": CHAT, "conversations": CHAT}, "both messages and conversations hold"),
        # documents
        (
            {"url": "https://h/a", "text": "t", "sha256": "zz"},
            "sha256: 'zz' is not 64 hexadecimal digits",
        ),
        (
            {"images": ["a", None], "texts": ["x", "y"], "metadata": "[]", "general_metadata": ""},
            r"both images\[0\] and texts\[0\] are set",
        ),
        (
            {"text_list": [], "image_info": [{"image_name": "b.jpg", "matched_text_index": 1}]},
            "matched_text_index is not that of a text",
        ),
        # https://lhotse.readthedocs.io/en/latest/cuts.html: several files, and commands
        (
            {
                "id": "m",
                "type": "MixedCut",
                "tracks": [{"type": "MonoCut", "cut": {}, "offset": 0.0, "snr": None}],
            },
            r"a mixed cut of Lhotse; save its audio, such as with cut\.save_audio",
        ),
        (
            lhotse(
                {"type": "file", "channels": [0], "source": "0.wav"},
                {"type": "file", "channels": [1], "source": "1.wav"},
                supervisions=[{"start": 0, "duration": 1, "text": "said"}],
            ),
            "recording: 2 sources; one file with all channels is needed",
        ),
        (
            lhotse({"type": "command", "source": "rm -rf"}),
            "a source of type 'command' is not supported",
        ),
        (lhotse({"type": "file"}), "recording: source: expected a string, found null"),
        # spans that are none
        (dense([4, 1.5]), r"timestamps\[0\]: ends at 1.5 s, not after its start at 4 s"),
        (dense([-1, 2]), r"timestamps\[0\]: -1 s is before the beginning"),
        (dense([1, "nan"]), "expected a number, found 'nan'"),
        (dense([1]), r"expected \[start, end\], found 1 items"),
        # structs of Hugging Face without a file's bytes
        (
            {"audio": {"array": [0.0], "sampling_rate": 8000}, "text": "x"},
            r"decoded audio; .*Audio\(decode=False\)",
        ),
        ({"image": {"bytes": b""}, "text": "x"}, "image: no bytes"),
    ],
)
def test_a_row_that_does_not_hold_what_its_corpus_promises_is_rejected(row, reason):
    with pytest.raises(RowError, match=reason):
        draft_of(row)


def test_the_rows_of_the_documentation_are_recognised_and_read_whole():
    examples = list(rows_by_format())
    for name, row in examples:
        assert recognise(row) == name
        assert draft_of(row).unread == ()
    assert {name for name, _ in examples} == {
        name for name in FORMATS if not name.startswith("mmc4-")
    }


KEYS = sorted({key for _, row in rows_by_format() for key in row})
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from(["<image>", "<bbox>", "a.jpg", "user", "text", "\n\nHuman:", "0:01"]),
)
WORDS = ["role", "content", "type", "from", "value", "bytes", "path", "user", "text"]
WORDS += ["start", "end"]
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_row_of_any_format_is_read_or_rejected(data):
    row = dict(data.draw(st.sampled_from([row for _, row in rows_by_format()])))
    row |= data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
    for name in (None, data.draw(st.sampled_from(list(FORMATS)))):
        with suppress(RowError):
            draft = draft_of(row, name)
            media = [Media("jpg", JPG.data)] * len(draft.media)
            assert list(samples_of("k", draft, media, per_caption=False))
