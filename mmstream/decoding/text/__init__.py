"""Text: messages or a caption -> input_ids, attention_mask, labels.

decoder.py        `TextDecoder`: the settings, and the texts of samples from start to end
chat.py           renders chat templates and finds the assistant's turns
placeholders.py   makes as many tokens of an image's placeholder as the model needs
image_lengths.py  says how many tokens an image takes, per model family
"""
