"""Step 3 of a conversion: one parsed row -> one `Draft`, for every published row format.

row_format.py    `RowFormat`: the caller's columns, function, dataset_info, tars, and format
formats.py       recognises a row's format by its keys
dialogue.py      turns of a conversation: llava, messages; boxes in them
instruction.py   a question and its answer: qwen-vl, instruction
vqa.py           questions about pictures
texts.py         The Cauldron, FineVision
preference.py    pairs of answers, and verdicts
captions.py      media with captions, labels or nothing; text
interleaved.py   documents: obelics, mmc4
speech.py        manifests of speech
spans.py         texts about spans of a video or an audio file
fields.py        typed values and media of a row, and its `Draft`
"""
