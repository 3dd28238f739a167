"""Step 3 of a conversion: one parsed row -> one `Draft`, for every published row format.

row_format.py    `RowFormat`: the caller's columns, function, dataset_info and format
function.py      the caller's function, by its name
tags.py          LLaMA-Factory's dataset_info.json
tarred.py        rows whose sound is a member of a tar beside their file
formats.py       recognises a row's format by its keys
dialogue.py      turns of a conversation: llava, messages
grounding.py     boxes in the turns
instruction.py   a question and its answer: qwen-vl, instruction
vqa.py           questions about pictures
texts.py         The Cauldron, FineVision
preference.py    pairs of answers, and verdicts
captions.py      media with captions, labels or nothing; text
interleaved.py   documents: obelics, mmc4
speech.py        manifests of speech
lerobot.py       episodes of robots
spans.py         texts about spans of a video or an audio file
media_values.py  a path, a URL, base64, bytes or a struct -> a medium
fields.py        typed values
drafts.py        what a format knows -> the `Draft`
"""
