"""Text: messages or a caption -> input_ids, attention_mask, labels.

decoder.py        `TextDecoder`: the settings, and the texts of samples from start to end
turns.py          roles and tool calls, as people write them
chat.py           renders chat templates and finds the assistant's turns
message_starts.py tells which message wrote what of a rendered conversation
media_parts.py    says what happens to media that nothing decodes
placeholders.py   makes as many tokens of a medium's placeholder as the model needs
image_lengths.py  says how many tokens an image takes, per model family
video_lengths.py  the same for videos; with times between the frames, where a model wants them
audio_lengths.py  the same for audio
loss.py           what a text has lost: cut off, or dropped
media_text.py     `MediaText`: what stands for a medium where equal tokens are not enough
"""
