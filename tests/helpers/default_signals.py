"""The signals of the processes that tests start."""

from __future__ import annotations

import signal


def reset_ignored_signals() -> None:
    """Handle what the parent ignored: a child inherits a signal that is ignored, but no handler.

    ``nohup`` leaves SIGHUP ignored, and ``&`` in a script leaves SIGINT and SIGQUIT ignored. The
    handlers of SIGHUP and SIGQUIT do nothing, so this process still survives the end of a terminal.
    """
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: lambda *_: None,
        signal.SIGQUIT: lambda *_: None,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
