"""Storage: the numbers that the transfers of a reader process go by.

`mmstream.storage.patience` has those of waiting for a store that fails.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_PREFIX_RATE", "TransferLimits"]

MAX_PREFIX_RATE = 5500
"""GET requests/s that a prefix of S3 answers at least. Under a steady load S3 splits prefixes."""


@dataclass(frozen=True)
class TransferLimits:
    """The numbers behind requests in flight, time-outs and hedges, each with its reason."""

    # Requests in flight

    start_in_flight: int = 64
    """Of all ranks of a node together, as they start: 64 ranges of 4 MiB hide 200 ms at 1 GB/s."""
    min_start_in_flight: int = 8
    """Of a rank, as it starts: many ranks on a node still overlap their first requests."""
    min_in_flight: int = 4
    """Of a rank, whatever happens: fewer cannot show that a store is well again."""
    max_in_flight: int = 512
    """Of all ranks of a node together: more only fills the queues of the network and the store."""
    short_permits: float = 0.5
    """Permits that a request for a short range takes: it mostly waits, and brings few bytes."""
    sent_at_once: int = 4
    """Requests that are sent before other things get their turn. Fresh memory for 4 MiB takes 1 to
    2 ms. Up to 64 at once held up the answer to a worker for 20 to 60 ms."""
    start_slowdown: float = 1.5
    """Factor of the time of the first requests above which doubling ends: twice as many requests
    that take this much longer bring a third more bytes/s."""
    step_up: float = 1.5
    """Factor of a step up: 64 are 216 after three. Larger ones open many connections at once for
    nothing where the link, or the CPU, is full. A useless one is taken back at once."""
    min_gain: float = 1.1
    """Factor of bytes/s that a step up must bring, or it is taken back: less is noise."""
    comparable: float = 1.5
    """Factor of the mean bytes of a request above which a trial says nothing: a run of 4 MiB brings
    ten times the bytes/s of a single sample on the same connections."""
    min_trial_s: float = 0.5
    """Seconds over which bytes/s are measured: at 1 MiB a piece and 10 MB/s, 5 of a connection."""
    retrial_s: float = 30.0
    """Seconds before the next step up after a useless one: a link that is full stays full."""
    recovery_s: float = 10.0
    """Seconds before the next step up after the number was halved: a store recovers slowly."""
    full_s: float = 5.0
    """Seconds without a queued range after which an eighth goes: the consumer needs no more."""
    reserved_share: float = 1 / 8
    """Permits that only urgent ranges get, so that those far ahead never fill all connections."""
    urgent_steps: int = 2
    """Ranges whose deadline is fewer steps ahead are urgent: this step's, and the next one's."""
    min_connection_rate: float = 1e6
    """Median bytes/s of a request below which too many share the link: more only get late."""
    forgiven_share: float = 0.1
    """Share of requests that may time out or be refused before the number is halved: sending those
    again costs less than half of the connections."""
    forgiven_burst: int = 8
    """Requests that may fail so at once, after a time without any: an eighth of 64, and of more."""

    # Time-outs

    min_first_byte_s: float = 5.0
    """Least time-out of a first byte: a lost packet and a busy server take up to some seconds."""
    max_first_byte_s: float = 60.0
    """Largest one, and the longest standstill of a stream. No server in use takes longer."""
    first_byte_factor: float = 3.0
    """The time-out is this multiple of the last minute's p99, so that a slow store stays usable."""
    least_speed_s: float = 10.0
    """Seconds over which a stream is compared with its neighbours: a pause of TCP is shorter."""
    least_speed_share: float = 0.1
    """A stream slower than this share of its neighbours' median is given up, and continued."""
    dribble_rate: float = 1e3
    """Bytes/s below which a stream is given up whatever its neighbours do: no link is that slow."""

    # Ranges that are overdue

    min_overdue_s: float = 2.0
    """Least seconds after which a request is overdue: a packet that was lost twice takes less."""
    overdue_factor: float = 3.0
    """A request is overdue after this multiple of the time that nine of ten take, as a whole. It is
    not the p99: one request in twenty may dribble."""
    overdue_share: float = 1 / 8
    """Overdue ranges that are hedged at a time, as a share of the permits, whatever hedges may be
    sent: where all requests are slow, this is the load that they add."""
    min_overdue_samples: int = 8
    """Requests that must have ended: of fewer, the slowest one says too little."""

    # Hedges

    late_first_byte_factor: float = 1.5
    """A first byte is late after this multiple of the last minute's p95. With 3, many hedges came
    after their step: where 2 % of the requests are 20 times slower, 100 batches took 11.9 s, and
    8.9 with 1.5 (simulated at 200 ms). Without a tail, that is 1.5 % more requests."""
    late_factor: float = 3.0
    """A stream below the p5 of rates is late if its rest takes this multiple of a new request's
    time."""
    slack_factor: float = 2.0
    """A range is hedged if it is needed within this multiple of a new request's time."""
    hedged_share: float = 0.05
    """Hedges' share of requests and of bytes. Fewer than one in twenty is later than the p95, so
    all that are late may be hedged; of two in a hundred, 2 % would leave some."""
    hedged_burst: int = 8
    """Hedges that may be sent at once, after a time without any."""
    hedged_burst_bytes: int = 32 << 20
    """Bytes that may be hedged at once: eight ranges of 4 MiB."""
    max_side_by_side: int = 3
    """Requests for the same bytes: a late one, its hedge, and one more if that is late too."""
    slowdown: float = 2.0
    """No hedges while the last minute's p50 is over this multiple of the hour's: all are slow."""
    min_samples: int = 32
    """Requests that must be measured before any is called late: the first ones are the quickest."""

    # Memory

    memory_s: float = 30.0
    """Seconds for which a range that a step waits for is refused memory, before that is an error. A
    worker gives memory back once it is done with its step: decoding one takes less."""

    # Measuring

    tick_s: float = 0.05
    """Seconds between two looks at the requests in flight: a hedge is late by half of it."""
    refresh_s: float = 0.5
    """Seconds after which time-outs are worked out anew: quantiles of a minute change slowly."""
    min_rated_bytes: int = 256 << 10
    """Bytes of a request from which its rate is measured: shorter ones come in one packet train."""
    piece_bytes: int = 1 << 20
    """Bytes that a client may hold back: a stream counts as if they had arrived."""
    min_progress_bytes: int = 64 << 10
    """Bytes after which a broken request is continued without a pause: the server does answer."""
    close_s: float = 5.0
    """Seconds that cancelled requests get to end at the close, and an answer whose bytes have all
    come: closing a connection is quick."""
    silent_s: float = 1.0
    """Seconds without any answer from a store after which the first one ends all pauses."""
