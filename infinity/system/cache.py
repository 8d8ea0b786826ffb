"""The user's cache: small files of this package, each written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")


def cache_file(name: str) -> Path:
    """The path of a cached file: in $XDG_CACHE_HOME/infinity, by default ~/.cache/infinity."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "infinity" / name


class JsonFile(Generic[Content]):
    """A JSON file of the cache, read once. A file that is absent or cannot be used counts as empty."""

    def __init__(self, name: str, understand: Callable[[Any], Content], empty: Content) -> None:
        """understand: turns the parsed JSON into the content. For JSON that `save` did not write it raises
        ValueError, whose text says why, TypeError, KeyError or AttributeError."""
        self.path = cache_file(name)
        self.content = empty
        self.ignored: str | None = None
        """The reason why an existing file counts as empty; None if it does not."""
        try:
            self.content = understand(json.loads(self.path.read_text()))
        except FileNotFoundError:
            pass
        except OSError as error:
            self.ignored = error.strerror
        except ValueError as error:
            self.ignored = str(error)
        except (TypeError, KeyError, AttributeError):
            self.ignored = "it has another form"

    def save(self, content: Any) -> bool:
        """Replace the file, as `write_bytes` does."""
        return write_bytes(self.path, json.dumps(content, indent=1).encode())


def read_bytes(path: Path) -> bytes | None:
    """The file's content; None where there is no file, or an empty one."""
    try:
        return path.read_bytes() or None
    except OSError:
        return None


def write_bytes(path: Path, content: bytes) -> bool:
    """Replace the file in one step, so that no reader sees half of it; False where the system refuses."""
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
