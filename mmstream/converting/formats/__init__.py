"""Step 2 of a conversion: one parsed row -> one `Draft`, for every published row format.

formats.py    recognises a row's format by its keys; a pure function for each format
dialogue.py   the turns of a conversation
fields.py     typed values, media keys, the id
"""
