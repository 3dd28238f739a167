"""Step 3 of a conversion: one parsed row -> one `Draft`, for every published row format.

formats.py       recognises a row's format by its keys; `RowFormat`: the caller's columns, function,
                 dataset_info, tars, and format
dialogue.py      turns of a conversation: llava, messages; boxes in them
questions.py     questions with answers: vqa, instruction, texts; pairs of answers: preference
captions.py      media with captions, labels or nothing; text; documents: obelics, mmc4
spans.py         texts about spans of a video or an audio file; manifests of speech
fields.py        typed values and media of a row, and its `Draft`
"""
