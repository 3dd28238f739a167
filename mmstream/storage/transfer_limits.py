"""Storage: the numbers that the transfers of a reader process go by.

`mmstream.storage.patience` has those of waiting for a store that fails.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PREFIX_RATE = 5500
"""GET requests/s that a prefix of S3 answers at least. Under a steady load S3 splits prefixes."""


@dataclass(frozen=True)
class TransferLimits:
    """The numbers behind requests in flight and late requests, each with its reason."""

    # Requests in flight

    start_in_flight: int = 64
    """Of all ranks of a node together, as they start: 64 ranges of 4 MiB hide 200 ms at 1 GB/s."""
    min_start_in_flight: int = 8
    """Of a rank, as it starts: many ranks on a node still overlap their first requests."""
    min_in_flight: int = 4
    """Of a rank, whatever happens: fewer cannot show that a store is well again."""
    max_in_flight: int = 512
    """Of all ranks of a node together: more only fills the queues of the network and the store."""
    sent_at_once: int = 4
    """Requests that are sent before other things get their turn. Fresh memory for 4 MiB takes 1 to
    2 ms. Up to 64 at once held up the answer to a worker for 20 to 60 ms."""
    slowdown: float = 1.5
    """Factor of the least median time of requests above which their number is not doubled: twice
    as many requests that take this much longer bring a third more bytes/s."""
    min_connection_rate: float = 1e6
    """Median bytes/s of a request below which too many share the link: more only get late."""
    recovery_s: float = 10.0
    """Seconds before the number doubles again after failures halved it: stores recover slowly."""
    reserved_share: float = 1 / 8
    """Permits that only urgent ranges get, so that those far ahead never fill all connections."""
    urgent_steps: int = 2
    """Ranges whose deadline is fewer steps ahead are urgent: this step's, and the next one's."""
    forgiven_share: float = 0.1
    """Share of requests that may time out or be refused before the number is halved: sending those
    again costs less than half of the connections."""
    forgiven_burst: int = 8
    """Requests that may fail so at once, after a time without any: an eighth of 64, and of more."""

    # Late requests

    late_factor: float = 2.0
    """A request is late once it brings nothing for this multiple of the usual time: that to the
    first byte, or that of a piece. With 3, the p99 of waits was 203 ms where 1 % of the responses
    stop in the middle, and 111 with 2 (simulated at 50 ms and 40 MB/s a connection)."""
    min_late_s: float = 0.1
    """Least seconds until then: a busy machine reads a socket that much later. With 1 s, batches
    came at 0.7 times the speed where 2 % of the requests are 20 times slower."""
    late_share: float = 0.05
    """Share of requests that may be sent again because they are late, or before the end of a pause:
    where all requests are slow, this is the load that it adds."""
    late_burst: int = 8
    """Requests that may be sent again so at once, after a time without any."""
    standstill_s: float = 5.0
    """Seconds without `least_bytes` after which a request that is late is sent again in any case:
    a lost packet and a busy server take up to some seconds."""
    max_standstill_s: float = 60.0
    """The largest of these time-outs. No server in use takes longer."""
    dribble_factor: float = 10.0
    """A request that takes this multiple of the usual time, and the time-out, is sent again too."""
    least_bytes: int = 16 << 10
    """Bytes that count as progress: below 3 kB/s a response stands still. A range that came so far
    is continued without a pause: the server does answer."""

    # Memory

    memory_s: float = 30.0
    """Seconds for which a range that a step waits for is refused memory, before that is an error. A
    worker gives memory back once it is done with its step: decoding one takes less."""

    # Measuring

    tick_s: float = 0.05
    """Seconds between two looks at the requests in flight: late ones are seen by half of it."""
    num_speeds: int = 128
    """Requests that ended of late and say what is usual: a few seconds of them."""
    min_speeds: int = 8
    """Requests that must have ended: fewer say too little."""
    min_rated_bytes: int = 256 << 10
    """Bytes of a request from which its rate is measured: shorter ones come in one packet train."""
    piece_bytes: int = 1 << 20
    """Bytes that a client may hold back until it hands them over as one piece."""
    guessed_piece_s: float = 1.5
    """Seconds that a piece takes where all ranges so far were too short to have a rate."""
    close_s: float = 5.0
    """Seconds that cancelled requests get to end at the close, and a response whose bytes have all
    come: closing a connection is quick."""
    silent_s: float = 1.0
    """Seconds without any response from a store after which the first one ends all pauses."""
