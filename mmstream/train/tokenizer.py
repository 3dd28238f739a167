"""A tokenizer that needs no download: one token a byte, the same everywhere.

It makes the demonstration run on any machine and any language; a real run names a tokenizer folder.
"""

from __future__ import annotations

from typing import Any

__all__ = ["byte_tokenizer", "open_tokenizer"]


def byte_tokenizer() -> Any:
    """Return a `transformers` fast tokenizer of 256 bytes and <pad>, <bos>, <eos>.

    Ids 0-255 are the bytes, in the order of GPT-2's printable stand-ins for them, 256 <pad>, 257
    <bos>, 258 <eos>. A text becomes <bos> bytes <eos>, also when it is truncated. No chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Sorted, because the library hands the alphabet over in a hash's order.
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<bos>", "<eos>"]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[("<bos>", vocab["<bos>"]), ("<eos>", vocab["<eos>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )


def open_tokenizer(folder: str | None) -> Any:
    """Return the tokenizer saved in a local folder, or the byte tokenizer for None.

    Code in the folder is never run, and nothing is downloaded.
    """
    if folder is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
