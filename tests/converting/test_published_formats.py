"""A row of every published corpus format, written after its schema, and what becomes of it.

Each case names its schema. `test_real_corpora` below reads rows as their authors wrote them.
"""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstream.converting.draft import Media, MediaRef, RowError, samples_of
from mmstream.converting.formats.formats import FORMATS, draft_of, recognise
from mmstream.converting.formats.row_format import RowFormat
from mmstream.converting.rows.groups import group_rows
from mmstream.converting.rows.open import open_rows
from tests.helpers.paths import ROOT
from tests.helpers.rows import rows_by_format

JPG = b"\xff\xd8\xff"
HASH = "ab" * 32


def text(value):
    return {"type": "text", "text": value}


def image(index):
    return {"type": "image", "field": index}


def turns(content, key="messages"):
    return [(m["role"], m["content"]) for m in content[key]]


@pytest.mark.parametrize("row_format", [None, "llava"])
def test_a_video_of_llava_video_may_stand_behind_its_image_token(row_format):
    """https://huggingface.co/datasets/lmms-lab/LLaVA-Video-178K"""
    row = {
        "id": "v1",
        "video": "a/b.mp4",
        "data_source": "0_30_s_academic",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat happens?"},
            {"from": "gpt", "value": "Rain."},
        ],
    }
    draft = draft_of(row, row_format)
    assert draft.media == (MediaRef("video", "a/b.mp4"),)
    assert turns(draft.content)[0] == (
        "user",
        [{"type": "video", "field": 0}, text("What happens?")],
    )
    assert draft.content["data_source"] == "0_30_s_academic"


def test_pairs_of_human_and_assistant_are_turns():
    """https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html"""
    row = {"system": "s", "conversation": [{"human": "hi", "assistant": "hello"}]}
    assert turns(draft_of(row).content) == [
        ("system", [text("s")]),
        ("user", [text("hi")]),
        ("assistant", [text("hello")]),
    ]


def test_recordings_may_be_turns_of_their_own():
    """NeMo's multimodal conversations, https://github.com/NVIDIA/NeMo"""
    row = {
        "id": "c",
        "conversations": [
            {"from": "User", "value": "What is said?", "type": "text"},
            {"from": "User", "value": "a.wav", "type": "audio", "duration": 1.5},
            {"from": "Assistant", "value": "Good morning.", "type": "text"},
        ],
    }
    draft = draft_of(row)
    assert draft.media == (MediaRef("audio", "a.wav"),)
    assert turns(draft.content) == [
        ("user", [text("What is said?"), {"type": "audio", "field": 0, "duration": 1.5}]),
        ("assistant", [text("Good morning.")]),
    ]


def test_turns_of_text_with_a_type_may_have_tokens():
    row = {
        "image": "a.jpg",
        "conversations": [{"from": "human", "value": "<image>\nWhat?", "type": "text"}],
    }
    assert turns(draft_of(row).content) == [("user", [image(0), text("What?")])]


def test_query_and_response_have_a_history():
    """https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html"""
    row = {"query": "<image>b?", "response": "b!", "history": [["a?", "a!"]], "images": ["x.jpg"]}
    assert turns(draft_of(row).content) == [
        ("user", [text("a?")]),
        ("assistant", [text("a!")]),
        ("user", [image(0), text("b?")]),
        ("assistant", [text("b!")]),
    ]


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
    [(_, fields)] = samples_of("k", draft, [medium], each=False)
    answer = json.loads(fields["json"])["messages"][1]["content"]
    assert answer[1] == {**box, "field": "0.png", "width": 640, "height": 480}
    fractions = {**GROUNDING["objects"], "bbox": [[0.1, 0.2, 0.3, 1], [0, 1]], "bbox_type": "norm1"}
    answer = turns(draft_of({**GROUNDING, "objects": fractions}).content)[1][1]
    assert (answer[1]["unit"], answer[1]["bbox"]) == ("fraction", [0.1, 0.2, 0.3, 1])


@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        ({"bbox": [[1, 2, 3, 4]]}, "2 <bbox> tokens but 1 of them"),
        ({"bbox": [[1, 2, 3], [1, 2]]}, r"objects: bbox\[0\]: expected 2 or 4 numbers, found 3"),
        ({"bbox": [[1, "x"], [1, 2]]}, r"bbox\[0\]: expected a number, found 'x'"),
        ({"bbox": [[1, 2], [1, 2]], "bbox_type": "norm7"}, "bbox_type 'norm7' is neither"),
        ({"bbox": [[1, 2], [1, 2]], "image_id": [0, 1]}, r"bbox\[1\]: of image 1, the row has 1"),
        ({"bbox": [[1, 2], [1, 2]]}, "1 <ref-object> tokens but 0 of them"),
    ],
)
def test_boxes_that_fit_no_token_or_image_are_rejected(objects, reason):
    with pytest.raises(RowError, match=reason):
        draft_of({**GROUNDING, "objects": {"ref": ["x"] * ("<ref" not in reason), **objects}})


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
    [(_, fields)] = samples_of("k", draft, media, each=False)
    answer = json.loads(fields["json"])["messages"][1]["content"]
    assert [(part["field"], part["width"]) for part in answer if part["type"] == "bbox"] == [
        ("2.png", 30),
        ("0.jpg", 10),
    ]


def test_parts_of_openai_hold_urls_data_urls_and_sound():
    """https://platform.openai.com/docs/api-reference/chat/create"""
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "https://host/a.jpg", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ]
    draft = draft_of({"messages": [{"role": "user", "content": content}]})
    assert [(ref.kind, ref.path) for ref in draft.media] == [
        ("image", "https://host/a.jpg"),
        ("image", "data:image/png;base64,iVBORw0KGgo="),
        ("audio", "data:;base64,UklGRg=="),
    ]
    assert draft.content["media_paths"][1:] == [
        "data:image/png;base64,(34 characters)",
        "data:;base64,(21 characters)",
    ]


def test_parts_of_trl_take_the_images_of_their_column():
    """https://huggingface.co/docs/trl/dataset_formats (vision), as Parquet gives it back"""
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    row = {
        "images": [{"bytes": JPG, "path": None}],
        "messages": [
            {"role": "user", "content": parts, "tool_calls": None},
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        ],
    }
    draft = draft_of(row)
    assert draft.media == (MediaRef("image", "images[0]", JPG),)
    assert draft.content["messages"][0] == {"role": "user", "content": [image(0), text("What?")]}


def test_a_prompt_and_its_completion_are_messages():
    """https://huggingface.co/docs/trl/dataset_formats (prompt-completion)"""
    row = {
        "prompt": [{"role": "user", "content": "hi"}],
        "completion": [{"role": "assistant", "content": "hello"}],
    }
    assert turns(draft_of(row).content) == [("user", [text("hi")]), ("assistant", [text("hello")])]


def test_the_cauldron_and_finevision_have_texts_of_user_and_assistant():
    """https://huggingface.co/datasets/HuggingFaceM4/FineVision"""
    row = {
        "images": [{"bytes": JPG, "path": "a.jpg"}, {"bytes": JPG, "path": None}],
        "texts": [
            {"user": "What?", "assistant": "A.", "source": "AI2D"},
            {"user": "Why?", "assistant": "B."},
        ],
        "source": "ai2d",
        "relevance_ratings": [5, 4],
        "relevance_min": 4,
        "note": "n",
    }
    draft = draft_of(row)
    assert recognise(row) == "texts"
    assert turns(draft.content) == [
        ("user", [image(0), image(1), text("What?")]),
        ("assistant", [text("A.")]),
        ("user", [text("Why?")]),
        ("assistant", [text("B.")]),
    ]
    assert draft.content["media_paths"] == ["a.jpg", "images[1]"]
    assert draft.unread == ("note",)
    assert draft.content["relevance_ratings"] == [5, 4]
    assert draft.content["texts"] == [{"source": "AI2D"}, {}]


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


def test_several_questions_about_a_picture_are_turns():
    row = {"image": "a.jpg", "qa_pairs": [{"question": q, "answer": q + "!"} for q in "ab"]}
    assert [role for role, _ in turns(draft_of(row).content)] == ["user", "assistant"] * 2


def test_lists_of_questions_and_answers_are_turns():
    """https://huggingface.co/datasets/howard-hou/OCR-VQA"""
    row = {"image": "a.jpg", "questions": ["Who?", "What?"], "answers": ["Me.", ["a", "b", "b"]]}
    content = draft_of(row).content
    assert [parts[-1] for _, parts in turns(content)] == [
        text(word) for word in ("Who?", "Me.", "What?", "b")
    ]
    with pytest.raises(RowError, match="a question and no answer"):
        draft_of({**row, "answers": ["x"]})


@pytest.mark.parametrize(
    ("choices", "answer", "reason"),
    [
        (["2", "3", "5"], "1", "answer: 1 is no choice, and no index where choices are numbers"),
        (["cat", "dog"], "bear", "answer: bear is neither a choice nor the letter of one"),
        (["cat", "dog"], 0.5, "answer: 0.5 is neither a choice nor the letter of one"),
        (["cat", "dog"], -1, "answer: -1, and there are 2 choices"),
    ],
)
def test_an_answer_that_names_no_choice_is_rejected(choices, answer, reason):
    with pytest.raises(RowError, match=reason):
        draft_of({**VQA, "choices": choices, "answer": answer})


@pytest.mark.parametrize("answer", ["B. dog", "(B) dog", "B: dog", "(b)", "dog", 1])
def test_a_choice_is_named_by_letter_text_both_or_number(answer):
    draft = draft_of({**VQA, "choices": ["cat", "dog"], "answer": answer})
    assert turns(draft.content)[-1] == ("assistant", [text("B")])


def test_an_answer_beyond_the_choices_of_a_table_is_rejected():
    with pytest.raises(RowError, match="answer: 2, and there are 2 choices"):
        draft_of({**VQA, "a0": "cat", "a1": "dog", "answer": "2"})
    with pytest.raises(RowError, match="D: a choice, and one before it is empty"):
        draft_of({**VQA, "A": "cat", "B": "dog", "C": "", "D": "bear", "answer": "D"})


def test_questions_of_videochat_begin_with_their_instruction_and_keep_the_rest():
    """https://huggingface.co/datasets/OpenGVLab/VideoChat2-IT"""
    pairs = [{"i": "Be short.", "q": "Who?", "a": "A cat.", "t": 3}, {"i": "", "q": "?", "a": "!"}]
    content = draft_of({"video": "a.mp4", "QA": pairs}).content
    assert turns(content)[0][1][1:] == [text("Be short.\nWho?")]
    assert turns(content)[2] == ("user", [text("?")])
    assert content["QA"] == [{"t": 3}, {}]


def test_a_question_about_a_video_by_its_id_reads_the_file_of_this_name():
    """https://huggingface.co/datasets/MBZUAI/VideoInstruct-100K"""
    draft = draft_of({"q": "Who?", "a": "A cat.", "video_id": "v_x1"})
    assert draft.media == (MediaRef("video", "v_x1.mp4"),)
    assert draft.content["video_id"] == "v_x1"


def test_a_question_about_a_picture_without_its_file_is_no_text():
    """https://cs.stanford.edu/people/dorarad/gqa: ``imageId`` alone names the picture"""
    row = {"question": "What?", "answer": "cat", "imageId": "n1"}
    with pytest.raises(RowError, match=r"imageId: n1 is an id of a picture.*--format vqa"):
        draft_of(row)
    assert turns(draft_of(row, "vqa").content)[0] == ("user", [text("What?")])
    assert draft_of({**row, "image": None}).media == ()


def test_a_picture_with_a_question_alone_is_no_labelled_picture():
    row = {"image": "a.jpg", "question": "What does it say?", "caption_str": ["a", "b"]}
    with pytest.raises(RowError, match="a question and no answer"):
        draft_of(row)


def test_a_query_with_a_label_is_a_question_only_beside_a_picture():
    assert recognise({"query": "cat", "label": "1", "text": "A cat."}) == "text"


def test_a_file_name_beside_the_sound_it_names_is_no_second_sound():
    """https://huggingface.co/datasets/cvssp/WavCaps"""
    draft = draft_of({"audio": "1.wav", "file_name": "a.wav", "caption": "Rain."})
    assert draft.media == (MediaRef("audio", "1.wav"),)
    both = draft_of({"audio": "1.wav", "file_name": "a.jpg", "caption": "Rain."})
    assert [ref.kind for ref in both.media] == ["image", "audio"]


def test_numbered_captions_are_captions_in_their_order():
    """https://zenodo.org/record/4783391: Clotho"""
    draft = draft_of({"file_name": "a.wav", "caption_2": "b", "caption_10": "c", "caption_1": "a"})
    assert draft.texts == ("a", "b", "c")
    assert draft.media == (MediaRef("audio", "a.wav"),)


@pytest.mark.parametrize(("folder", "path"), [("val2014", "val2014/a.jpg"), (None, "a.jpg")])
def test_sentences_of_karpathy_are_captions(folder, path):
    """https://cs.stanford.edu/people/karpathy/deepimagesent"""
    sentences = [{"raw": "A man.", "tokens": ["a", "man"], "sentid": 1}, {"raw": "B."}]
    row = {"filename": "a.jpg", "filepath": folder, "sentences": sentences, "split": "restval"}
    draft = draft_of(row)
    assert (draft.media, draft.texts) == ((MediaRef("image", path),), ("A man.", "B."))
    assert (draft.unread, draft.content["split"]) == ((), "restval")


@pytest.mark.parametrize("key", ["original_path", "original_full_path"])
def test_times_in_another_file_are_no_span_of_the_part_that_was_cut_out(key):
    """https://huggingface.co/datasets: facebook/multilingual_librispeech, speechcolab/gigaspeech"""
    row = {"audio": {"bytes": b"fLaC", "path": "1.flac"}, "transcript": "good morning"}
    draft = draft_of({**row, "begin_time": 401.7, "end_time": 417.5, key: "book.mp3"})
    assert "segments" not in draft.content
    assert (draft.texts, draft.unread) == (("good morning",), ())
    assert draft.content["begin_time"] == 401.7


def test_voxpopuli_libritts_and_fleurs_have_a_normalized_text():
    """https://huggingface.co/datasets: facebook/voxpopuli, google/fleurs, and LibriTTS"""
    sound = {"audio": {"bytes": b"RIFF", "path": "1.wav"}}
    for row in (
        {"normalized_text": "one", "raw_text": "1"},
        {"text_normalized": "one", "text_original": "1", "path": "/tmp/1.wav"},
        {"transcription": "one", "raw_transcription": "1", "num_samples": 5},
    ):
        assert (draft_of(sound | row).texts, draft_of(sound | row).unread) == (("one",), ())


def test_the_address_of_a_page_with_a_video_is_no_picture():
    draft = draft_of({"video_id": "x1", "url": "https://host/watch", "caption": "A cat runs."})
    assert draft.media == (MediaRef("video", "x1.mp4"),)


USER, GOOD, BAD = ({"role": r, "content": c} for r, c in zip("uaa", "?+-", strict=True))
for turn, role in ((USER, "user"), (GOOD, "assistant"), (BAD, "assistant")):
    turn["role"] = role


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


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "+", "rejected": "-"}, "no prompt: expected prompt, messages or question"),
        ({"prompt": "?", "chosen": [], "rejected": "-"}, "chosen is empty"),
        ({"prompt": "?", "chosen": 5, "rejected": "-"}, "chosen: expected a text or turns, found"),
        ({"messages": [USER], "label": False}, "does not end with an answer"),
        ({"messages": [USER], "conversations": [USER]}, "both messages and conversations hold"),
    ],
)
def test_a_pair_without_prompt_or_answer_says_so(row, reason):
    with pytest.raises(RowError, match=reason):
        draft_of(row)


def test_a_whole_conversation_beside_a_pair_is_trained_unless_the_format_is_named():
    """https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized"""
    row = {"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": "?"}
    assert draft_of(row).unread == ("chosen", "rejected", "prompt")
    assert turns(draft_of(row, "preference").content, "rejected") == [("assistant", [text("-")])]


@pytest.mark.parametrize(
    "row",
    [
        {"URL": "https://h/a", "TEXT": "a cat", "WIDTH": 9, "HEIGHT": 9, "similarity": 0.3},
        {"url": "https://h/a", "text": "a cat", "uid": "u", "sha256": HASH, "face_bboxes": []},
        {"url": "https://h/a", "caption": "a cat"},
        {"url": "https://h/a", "alt": "a cat", "uid": "u"},
        {"url": "https://h/a.jpg", "text": "a cat"},
    ],
)
def test_pictures_of_the_web_are_named_by_their_url(row):
    """LAION-5B; DataComp (https://huggingface.co/datasets/mlfoundations/datacomp_1b); CC12M;
    cc2dataset"""
    draft = draft_of(row)
    assert draft.media == (
        MediaRef("image", row.get("URL") or row["url"], None, row.get("sha256")),
    )
    assert (draft.texts, draft.unread) == (("a cat",), ())


def test_web_text_with_its_address_stays_text():
    """https://huggingface.co/datasets/allenai/c4"""
    row = {"text": "x", "timestamp": "2019", "url": "https://host/page"}
    draft = draft_of(row)
    assert (draft.media, draft.texts, draft.unread) == ((), ("x",), ())
    with pytest.raises(RowError, match=r"sha256: 'zz' is not 64 hexadecimal digits"):
        draft_of({"url": "https://h/a", "text": "t", "sha256": "zz"})


def test_obelics_interleaves_texts_and_images_and_counts_those_that_are_null():
    """https://huggingface.co/datasets/HuggingFaceM4/OBELICS"""
    row = {
        "images": ["https://h/a.jpg", None, None, "https://h/b.jpg"],
        "texts": [None, "one", None, None],
        "metadata": "[]",
        "general_metadata": "{}",
    }
    draft = draft_of(row)
    assert turns(draft.content) == [("assistant", [image(0), text("one"), image(1)])]
    assert draft.content["num_missing_images"] == 1
    assert draft.unread == ()
    with pytest.raises(RowError, match=r"both images\[0\] and texts\[0\] are set"):
        draft_of({"images": ["a", None], "texts": ["x", "y"]}, "obelics")


def test_omnicorpus_is_a_document_with_facts_about_each_image():
    """https://huggingface.co/datasets/OpenGVLab/OmniCorpus-CC-210M, as Parquet gives it back"""
    fact = {"bytes": 90_112, "d_hash": "f0e1", "height": 480, "width": 640, "unsafe_prob": 0.01}
    row = {
        "images": [None, "https://h/a.jpg", None],
        "texts": ["one", None, "two"],
        "metadata": [None, fact, None],
        "general_metadata": {"url": "https://h/page", "id": "i", "fluency_prob": 0.9},
    }
    draft = draft_of(row)
    assert recognise(row) == "obelics"
    assert turns(draft.content) == [("assistant", [text("one"), image(0), text("two")])]
    assert draft.unread == ()
    assert draft.content["metadata"][1] == fact


def test_mmc4_puts_each_image_beside_the_text_that_it_matches():
    """https://github.com/allenai/mmc4"""
    info = [
        {"image_name": "b.jpg", "raw_url": "https://h/b", "matched_text_index": 1},
        {"image_name": "a.jpg", "raw_url": "https://h/a", "matched_text_index": 0},
    ]
    row = {"text_list": ["one", "two"], "image_info": info, "similarity_matrix": [], "url": "u"}
    draft = draft_of(row)
    assert turns(draft.content) == [("assistant", [image(0), text("one"), image(1), text("two")])]
    assert [ref.path for ref in draft.media] == ["https://h/a", "https://h/b"]
    assert [ref.path for ref in draft_of(row, "mmc4-files").media] == ["a.jpg", "b.jpg"]
    for name, paths in (
        ("mmc4-after", ["https://h/a", "https://h/b"]),
        ("mmc4-files-after", ["a.jpg", "b.jpg"]),
    ):
        after = draft_of(row, name)
        content = [text("one"), image(0), text("two"), image(1)]
        assert turns(after.content) == [("assistant", content)]
        assert [ref.path for ref in after.media] == paths
    with pytest.raises(RowError, match="matched_text_index is not that of a text"):
        draft_of({"text_list": [], "image_info": info})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {
                "id": "m",
                "type": "MixedCut",
                "tracks": [{"type": "MonoCut", "cut": {}, "offset": 0.0, "snr": None}],
            },
            r"a mixed cut of Lhotse; save its audio, such as with cut\.save_audio",
        ),
        (
            {
                "id": "c",
                "type": "MultiCut",
                "recording": {
                    "sources": [
                        {"type": "file", "channels": [i], "source": f"{i}.wav"} for i in (0, 1)
                    ]
                },
                "supervisions": [{"start": 0, "duration": 1, "text": "said"}],
            },
            "recording: 2 sources; one file with all channels is needed",
        ),
    ],
)
def test_a_cut_of_several_files_says_what_to_do(row, reason):
    """https://lhotse.readthedocs.io/en/latest/cuts.html"""
    with pytest.raises(RowError, match=reason):
        draft_of(row)


SEGMENT = {"start_s": 1.5, "end_s": 4.0, "text": "said"}


@pytest.mark.parametrize(
    ("row", "path", "segments"),
    [
        # https://docs.nvidia.com/nemo-framework/user-guide/latest/nemotoolkit/asr/datasets.html
        ({"audio_filepath": "a.wav", "text": "said", "duration": 2.5}, "a.wav", None),
        (
            {"audio_filepath": "a.wav", "text": "said", "duration": 2.5, "offset": 1.5},
            "a.wav",
            [SEGMENT],
        ),
        # NeMo, Canary: the languages and the task stand beside the text
        (
            {
                "audio_filepath": "a.wav",
                "text": "said",
                "duration": 2.5,
                "source_lang": "en",
                "target_lang": "de",
                "taskname": "asr",
                "pnc": "yes",
                "lang": "en",
                "orig_sr": 48000,
            },
            "a.wav",
            None,
        ),
        # NeMo, SALM: the answer stands under a name of its own
        ({"audio_filepath": "a.wav", "answer": "said", "duration": 2.5}, "a.wav", None),
        # https://commonvoice.mozilla.org
        ({"client_id": "c", "path": "a.mp3", "sentence": "said", "up_votes": "2"}, "a.mp3", None),
        # https://lhotse.readthedocs.io/en/latest/cuts.html
        (
            {
                "id": "c1",
                "start": 1.0,
                "duration": 5.0,
                "channel": 0,
                "type": "MonoCut",
                "recording": {"sources": [{"type": "file", "channels": [0], "source": "a.flac"}]},
                "supervisions": [{"start": 0.5, "duration": 2.5, "text": "said", "speaker": "s"}],
            },
            "a.flac",
            [{**SEGMENT, "speaker": "s"}],
        ),
        # https://github.com/SpeechColab/GigaSpeech
        (
            {
                "aid": "POD1",
                "path": "a.opus",
                "md5": "x",
                "segments": [{"sid": "s", "begin_time": 1.5, "end_time": 4.0, "text_tn": "said"}],
            },
            "a.opus",
            [{**SEGMENT, "sid": "s"}],
        ),
    ],
)
def test_manifests_of_speech_give_the_file_and_the_spans_in_it(row, path, segments):
    draft = draft_of(row)
    assert draft.media == (MediaRef("audio", path),)
    assert draft.texts == ("said",)
    assert draft.content.get("segments") == segments
    assert draft.unread == ()
    facts = {"source_lang", "target_lang", "taskname", "pnc", "lang", "orig_sr"} & row.keys()
    assert {key: draft.content[key] for key in facts} == {key: row[key] for key in facts}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"type": "command", "source": "rm -rf"}, "a source of type 'command' is not supported"),
        ({"type": "file"}, "recording: source: expected a string, found null"),
    ],
)
def test_a_recording_of_lhotse_is_one_file_and_never_a_command(source, reason):
    with pytest.raises(RowError, match=reason):
        draft_of({"recording": {"sources": [source]}, "supervisions": []})


@pytest.mark.parametrize(
    ("row", "path", "num_segments"),
    [
        # https://github.com/m-bain/webvid
        ({"videoid": "1", "contentUrl": "https://h/1.mp4", "name": "said"}, "https://h/1.mp4", 0),
        # https://huggingface.co/datasets/OpenGVLab/InternVid
        (
            {
                "YoutubeID": "x1",
                "Start_timestamp": "00:00:01.500",
                "End_timestamp": "00:00:04.000",
                "Caption": "said",
            },
            "x1.mp4",
            1,
        ),
        # https://github.com/snap-research/Panda-70M
        (
            {
                "videoID": "x1",
                "url": "https://youtube/x1",
                "timestamp": [["0:00:01.5", "0:00:04"], ["0:00:05", "0:00:06"]],
                "caption": ["said", "more"],
                "matching_score": [0.5, 0.4],
            },
            "x1.mp4",
            2,
        ),
        # https://github.com/NJU-PCALab/OpenVid-1M
        ({"video": "x1.mp4", "caption": "said", "fps": "30"}, "x1.mp4", 0),
        # https://cs.stanford.edu/people/ranjaykrishna/densevid
        (
            {
                "video": "x1.mp4",
                "duration": 9.0,
                "timestamps": [[1.5, 4.0], [4, 9]],
                "sentences": ["said", "more"],
            },
            "x1.mp4",
            2,
        ),
        # rows about one video, joined by --group-spans
        (
            {"video": "x1.mp4", "segments": [{"start": "1.5", "end": "4", "caption": "said"}]},
            "x1.mp4",
            1,
        ),
    ],
)
def test_a_video_is_stored_once_with_all_its_spans(row, path, num_segments):
    draft = draft_of(row)
    assert draft.media == (MediaRef("video", path),)
    assert len(draft.content.get("segments", ())) == num_segments
    assert draft.texts == (() if num_segments > 1 else ("said",))
    if num_segments:
        assert draft.content["segments"][0] == SEGMENT
    media = [Media("mp4", b"v")]
    [(_, fields)] = (
        samples_of("k", draft, media, each=True)
        if num_segments > 1
        else [next(samples_of("k", draft, media, each=False))]
    )
    assert "mp4" in fields


def test_captions_of_vatex_are_those_of_one_language():
    """https://eric-xw.github.io/vatex-website"""
    row = {"videoID": "Ptf_2VRj-V0_000122_000132", "enCap": ["one", "two"], "chCap": ["一", "二"]}
    draft = draft_of(row)
    assert draft.media == (MediaRef("video", "Ptf_2VRj-V0_000122_000132.mp4"),)
    assert (draft.texts, draft.unread) == (("one", "two"), ())
    assert draft.content["chCap"] == ["一", "二"]
    chinese = RowFormat(columns=(("enCap", "chCap"),)).draft(row)
    assert chinese.texts == ("一", "二")


INTERNVID = [
    {"YoutubeID": "x", "Start_timestamp": "0:01", "End_timestamp": "0:02", "Caption": "a"},
    {"YoutubeID": "x", "Start_timestamp": "0:02", "End_timestamp": "0:03", "Caption": "b"},
    {"YoutubeID": "y", "Start_timestamp": "0:02", "End_timestamp": "0:03", "Caption": "c"},
]
NEMO = [
    {"audio_filepath": "x.wav", "offset": i, "duration": 1, "text": t}
    for i, t in ((1, "a"), (2, "b"))
]


@pytest.mark.parametrize(("rows", "path"), [(INTERNVID, "x.mp4"), (NEMO, "x.wav")])
def test_grouped_rows_are_spans_of_one_medium(rows, path):
    first, *others = [row for _, row in group_rows(enumerate(rows, 1))]
    draft = draft_of(first)
    assert [ref.path for ref in draft.media] == [path]
    assert draft.content["segments"] == [
        {"start_s": 1.0, "end_s": 2.0, "text": "a"},
        {"start_s": 2.0, "end_s": 3.0, "text": "b"},
    ]
    assert others == rows[2:]


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        ([4, 1.5], r"timestamps\[0\]: ends at 1.5 s, not after its start at 4 s"),
        ([-1, 2], r"timestamps\[0\]: -1 s is before the beginning"),
        ([1, "nan"], "expected a number, found 'nan'"),
        ([1], r"expected \[start, end\], found 1 items"),
    ],
)
def test_a_span_that_is_none_is_rejected(span, reason):
    with pytest.raises(RowError, match=reason):
        draft_of({"video": "a.mp4", "timestamps": [span], "sentences": ["x"]})


def test_base64_is_a_medium_and_never_text_of_the_json():
    """https://huggingface.co/datasets/MMInstruction/M3IT"""
    data = "/9j/" + "4AAQSkZJRgABAQAAAQABAAD" * 20
    row = {
        "instruction": "Describe.",
        "inputs": "",
        "image_base64_str": [data],
        "outputs": "A cat.",
    }
    draft = draft_of(row)
    assert [ref.path for ref in draft.media] == [f"data:;base64,{data}"]
    assert turns(draft.content) == [
        ("user", [image(0), text("Describe.")]),
        ("assistant", [text("A cat.")]),
    ]
    llava = {"image": data, "conversations": [{"from": "human", "value": "<image>?"}]}
    for content in (draft.content, draft_of(llava).content):
        assert data[:64] not in json.dumps(content)


def test_signatures_and_passwords_of_urls_are_not_published():
    signed = "https://me:word@host/a.jpg?w=1&X-Amz-Signature=1f2e"
    draft = draft_of({"URL": signed, "TEXT": "x"})
    assert draft.media[0].path == signed
    assert draft.content["media_paths"] == ["https://***@host/a.jpg?w=1&X-Amz-Signature=***"]


def test_structs_of_hugging_face_give_bytes_or_paths():
    """https://huggingface.co/docs/datasets/about_dataset_features"""
    row = {"image": {"bytes": JPG, "path": "a.jpg"}, "text": "x", "thumb": {"bytes": JPG}}
    draft = draft_of(row)
    assert draft.media == (MediaRef("image", "a.jpg", JPG),)
    assert draft.content["thumb"] == {"bytes": "(3 bytes)"}
    assert draft_of({"audio": {"bytes": None, "path": "a.wav"}, "text": "x"}).media == (
        MediaRef("audio", "a.wav"),
    )
    assert draft_of({"image": JPG, "text": "x"}).media == (MediaRef("image", "image", JPG),)
    with pytest.raises(RowError, match=r"decoded audio; .*Audio\(decode=False\)"):
        draft_of({"audio": {"array": [0.0], "sampling_rate": 8000}, "text": "x"})
    with pytest.raises(RowError, match="image: no bytes"):
        draft_of({"image": {"bytes": b""}, "text": "x"})


@pytest.mark.parametrize("value", [3, "3"])
def test_a_label_becomes_cls(value):
    draft = draft_of({"image": "a.jpg", "label": value, "label_name": "cat"})
    [(_, fields)] = samples_of("k", draft, [Media("jpg", JPG)], each=False)
    content = {"id": None, "media_paths": ["a.jpg"], "label_name": "cat"}
    assert json.loads(fields.pop("json")) == content
    assert fields == {"jpg": JPG, "cls": b"3"}


def test_a_picture_alone_is_its_bytes_alone():
    draft = draft_of({"image": "a.jpg"})
    [(_, fields)] = samples_of("k", draft, [Media("jpg", JPG)], each=False)
    assert fields == {"jpg": JPG}
    assert draft_of({"image": "a.jpg", "label": "cat"}).content["label"] == "cat"


DATA = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(not DATA.is_dir(), reason="real corpora lie beside the checkout")
@pytest.mark.parametrize(
    ("name", "num_rows", "num_media"),
    [
        ("llamafactory_mllm_demo/data/mllm_demo.json", 6, 8),
        ("llamafactory_mllm_demo/data/mllm_audio_demo.json", 3, 3),
        ("llamafactory_mllm_demo/data/mllm_video_demo.json", 3, 3),
        ("qwen3vl_demo/qwen-vl-finetune/demo/single_images.json", 3, 3),
        ("llamafactory_mllm_demo/data/v1_multimodal_demo.jsonl", 24, 32),
        ("qwen3vl_demo/qwen-vl-finetune/demo/video.json", 3, 3),
        ("llava_text/caps_boxes_coco2014_val_80.jsonl", 80, 80),
        ("llava_text/coco2014_val_gpt4_qa_30x3.jsonl", 90, 90),
        ("llamafactory_mllm_demo/data/c4_demo.jsonl", 300, 0),
        ("coco/captions_val2017.jsonl", 5000, 5000),
    ],
)
def test_real_corpora_are_read_as_their_authors_wrote_them(name, num_rows, num_media):
    with open_rows(str(DATA / name)) as source:
        rows = source.select(range(source.num_rows)).read()
        drafts = [draft_of(row.value) for row in rows]
    assert (len(drafts), sum(len(draft.media) for draft in drafts)) == (num_rows, num_media)


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
WORDS = [
    "role",
    "content",
    "type",
    "from",
    "value",
    "bytes",
    "path",
    "user",
    "text",
    "start",
    "end",
]
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_row_of_any_format_is_read_or_rejected(data):
    row = dict(data.draw(st.sampled_from([row for _, row in rows_by_format()])))
    row |= data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
    for name in (None, data.draw(st.sampled_from(FORMATS))):
        with suppress(RowError):
            draft = draft_of(row, name)
            media = [Media("jpg", JPG)] * len(draft.media)
            assert list(samples_of("k", draft, media, each=False))
