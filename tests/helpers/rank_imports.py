"""What ranks import late, such as transformers. A process that forks ranks imports it once for all.

`gloo_ranks.run_ranks` names this module to its fork server.
"""

from mmstream.decoding import decode
from mmstream.families.registry import versions_of
from mmstream.loader import loader
from mmstream.train.tokenizer import byte_tokenizer

__all__ = ["decode", "loader"]

byte_tokenizer()
versions_of()  # reads what the installed packages say of themselves
