"""Chat templates of several kinds and a tokenizer made up in milliseconds, for the text tests."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import mmstream as mm
from mmstream.train.tokenizer import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} </s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Like Qwen3's: the reasoning of earlier turns is dropped, the last turn gets an empty one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set c = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{{ c }}"
    "{% elif loop.last %}{{ m['content'] }}{% else %}{{ c }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A turn's rendering depends on how many follow, so no rendering is the start of another.
UNSTABLE = (
    "{{ messages | length }} turns\n"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|image_pad|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% if m['content'][0]['type'] == 'image' %}<image>{% endif %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NEWLINES = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Messages = list[dict[str, Any]]


def byte_level_bpe(corpus: tuple[str, ...] = ("a cat on a mat", "what is this?")) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|image_pad|>",
            "<s>",
            "</s>",
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus * 20, trainer)
    return tokenizer


def tokenizer(template: str | None = None, **options: Any) -> PreTrainedTokenizerFast:
    options = {"eos_token": "<|endoftext|>", **options}
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), chat_template=template, **options
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


TWO_TURNS = [user("what is this?"), assistant("a cat"), user("where?"), assistant("on a mat 😀")]

# Renders what Qwen2-VL's and Qwen2.5-VL's templates render: a system turn of their own if there is
# none, an image between two marks, where it stands.
QWEN_VL = (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Renders what Llava 1.5's template of `transformers` renders: a turn's images come first, the
# answer is marked and has no end mark but a space.
LLAVA = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role | upper }}: {% endif %}"
    "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ p.text }} {% endgeneration %}"
    "{% else %}{{ p.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Renders what Llava 1.5 was trained on (Vicuna's form): an answer ends in </s>.
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: "
    "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %} "
    "{% elif m.role == 'assistant' %}ASSISTANT: "
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}</s>"
    "{% else %}{{ m.content[0].text }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<image>", "</s>"]  # fmt: skip


def byte_chat(template: str, special: list[str] = SPECIAL) -> Any:
    """A tokenizer of bytes, so that a text's tokens can be told without it, and special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def learned(tokenizer: Any, tokens: dict[str, Any]) -> str:
    """The text that has labels."""
    labels = tokens["labels"]
    return str(tokenizer.decode(labels[labels != -100]))


def trained(template: Any, *messages: dict[str, Any], tools: Any = None, **options: Any) -> str:
    """What of a conversation has labels, with a chat template and options of the decoder."""
    fast = byte_chat(template)
    row = {"messages": list(messages), "tools": tools}
    return learned(fast, mm.TextDecoder(fast, **options)({"json": row}))
