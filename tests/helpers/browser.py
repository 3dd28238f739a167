"""A real browser for pages: headless Chromium, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=5000",
]  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """A page as a browser sees it."""

    dom: str
    messages: list[str]
    """Lines of the browser's console: errors, and what a policy forbade."""


def open_page(page: Path | str, profile: Path, width: int = 1200, query: str = "") -> Opened:
    """Open a page on disk, or an address; skips the test where there is no browser."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    command = [browser, *FLAGS, f"--window-size={width},900", f"--user-data-dir={profile}"]
    command += ["--dump-dom", (page if isinstance(page, str) else page.as_uri()) + query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    messages = [line for line in done.stderr.splitlines() if re.search(r":CONSOLE\b", line)]
    return Opened(done.stdout, messages)
