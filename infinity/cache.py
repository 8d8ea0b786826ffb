"""What this package keeps in the user's cache: small files, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any


def cache_file(name: str) -> Path:
    """Where a file of that name is kept: $XDG_CACHE_HOME/infinity, by default ~/.cache/infinity."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "infinity" / name


def read_json(path: Path) -> Any:
    """What the file holds. Raises OSError where there is none, ValueError where it is not JSON."""
    return json.loads(path.read_text())


def write_json(path: Path, content: Any) -> bool:
    """Replace the file at once, so that no reader sees half of it; False where the system refuses."""
    return write_bytes(path, json.dumps(content, indent=1).encode())


def read_bytes(path: Path) -> bytes | None:
    """What the file holds; None where there is none, or nothing in it."""
    try:
        return path.read_bytes() or None
    except OSError:
        return None


def write_bytes(path: Path, content: bytes) -> bool:
    """As `write_json`, of any bytes."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
