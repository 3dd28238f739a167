"""Step 2 of a conversion: one parsed row -> one `Draft`, for every published row format.

formats.py       the table of formats; recognises a row's format by its keys; `RowParser`: the
                 caller's columns, function and dataset_info; formats of packages
dialogue.py      turns of a conversation: llava, messages; boxes in them
questions.py     questions with answers: vqa, instruction, texts; pairs of answers: preference
captions.py      media with captions, labels or nothing; text; documents: obelics, mmc4
spans.py         texts about spans of a video or an audio file; manifests of speech, and their tars
fields.py        `ParsedRow`; typed values and media of a row, and its `Draft`
"""
