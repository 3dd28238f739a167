"""Settings and keys of AWS for tests of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mmstream.storage import remote, retry

SECRET = "wJalrXUtnFEMI-secret"
TOKEN = "FwoGZXIvYXdzE-token"

_KEYS = """
import json, os, pathlib
calls = pathlib.Path({calls!r})
number = len(list(calls.iterdir()))
(calls / str(os.getpid())).touch()
print(json.dumps(dict(Version=1, AccessKeyId=f"KEY{{number}}", SecretAccessKey={secret!r},
                      SessionToken="T", Expiration={expiration!r})))
"""


def set_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set static keys, and nothing else. No store answered before, and no client is there."""
    for name in set(os.environ):
        if name.startswith(("AWS_", "FSSPEC_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    settings = {
        "ACCESS_KEY_ID": "KEY",
        "SECRET_ACCESS_KEY": SECRET,
        "REGION": "us-east-1",
        "CONFIG_FILE": str(folder / "config"),
        "SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # of indexes
    retry._health.cache_clear()
    remote._client_of.cache_clear()


def write_credential_process(folder: Path, expiration: str = "2099-01-01T00:00:00Z") -> Path:
    """Have a process give other keys at each call: KEY0, KEY1 and so on.

    Returns:
        The folder in which each call leaves a file.
    """
    (folder / "calls").mkdir()
    script = _KEYS.format(calls=str(folder / "calls"), secret=SECRET, expiration=expiration)
    (folder / "keys.py").write_text(script)
    config = f"[default]\ncredential_process = {sys.executable} -I {folder / 'keys.py'}\n"
    (folder / "config").write_text(config)
    return folder / "calls"
