"""Text: messages or a caption -> input_ids, attention_mask, labels.

decoder.py        `TextDecoder`: the settings, and the texts of samples from start to end
turns.py          roles and tool calls, as people write them
chat.py           renders chat templates and finds the assistant's turns
message_starts.py tells which message wrote what of a rendered conversation
placeholders.py   makes as many tokens of a medium's placeholder as the model needs, and says what
                  happens to media that nothing decodes
"""
