"""Text: messages or a caption -> input_ids, attention_mask, labels.

decoder.py        `TextDecoder`: the settings, and one sample from start to end
chat.py           chat templates, and which tokens are the assistant's
placeholders.py   image placeholders in a text
image_lengths.py  how many tokens an image takes, per model family
"""
