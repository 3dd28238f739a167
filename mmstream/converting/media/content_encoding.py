"""The body of an answer that a server compressed, although it was asked not to.

download (body) -> CONTENT ENCODING (bytes of the medium)
"""

from __future__ import annotations

import zlib

from mmstream.converting.draft import RowError
from mmstream.errors import escaped

_ANY_HEADER = 32 + zlib.MAX_WBITS
"""zlib reads both gzip's header and its own."""


def decompressed(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """Return a body without its compression. No more than `max_bytes` are ever unpacked.

    Args:
        body: As it came.
        encoding: ``Content-Encoding`` of the answer.
        max_bytes: Limit on the result.

    Raises:
        RowError: The result is larger, the body is damaged, or the compression is unknown. The
            message is only the reason.
    """
    name = (encoding or "identity").strip().lower()
    if name in ("identity", ""):
        return body
    if name not in ("gzip", "x-gzip", "deflate"):
        raise RowError(f"content-encoding {escaped(name)!r} is not supported")
    try:
        return _inflated(body, _ANY_HEADER, max_bytes)
    except zlib.error:
        pass
    try:  # some servers send "deflate" without a header
        return _inflated(body, -zlib.MAX_WBITS, max_bytes)
    except zlib.error:
        raise RowError(f"its {name} body is damaged") from None


def _inflated(body: bytes, wbits: int, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj(wbits)
    data = inflater.decompress(body, max_bytes + 1)
    if len(data) > max_bytes:
        raise RowError(f"larger than {max_bytes:,} bytes when decompressed")
    if not inflater.eof:
        raise zlib.error("truncated")
    if inflater.unused_data:  # to stop at the end of the first part would cut a medium
        raise zlib.error("more behind its end")
    return data
