"""User's cache: small files of this package, each of which is replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")


def cache_file(name: str) -> Path:
    """The path of a file in $XDG_CACHE_HOME/infinity, or by default in ~/.cache/infinity."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "infinity" / name


class JsonFile(Generic[Content]):
    """A JSON file in the user's cache, read into `content`."""

    def __init__(self, name: str, understand: Callable[[Any], Content], empty: Content) -> None:
        """Read the file `name`. A file that cannot be read or understood counts as empty; see `ignored`.

        understand: turns the parsed JSON into the content. For JSON of an unexpected form it raises
        ValueError (with the reason), TypeError, KeyError or AttributeError. empty: the content if the file is
        absent or counts as empty.
        """
        self.path = cache_file(name)
        self.content = empty
        self.ignored: str | None = None
        """Why an existing file counts as empty; None if the file is absent or was read."""
        try:
            self.content = understand(json.loads(_content(self.path)))
        except FileNotFoundError:
            pass
        except OSError as error:
            self.ignored = error.strerror
        except ValueError as error:
            self.ignored = str(error)
        except RecursionError:
            self.ignored = "its JSON has too many levels"
        except (TypeError, KeyError, AttributeError):
            self.ignored = "it has another form"

    def save(self, content: Any) -> bool:
        """Replace the file in one step. Returns whether the operating system allowed it."""
        return write_bytes(self.path, json.dumps(content, indent=1).encode())


def read_bytes(path: Path) -> bytes | None:
    """The content of a file; None if the file is absent, empty, or cannot be read."""
    try:
        return _content(path) or None
    except OSError:
        return None


def _content(path: Path) -> bytes:
    """Read a regular file. Raises OSError for other files, too: reading a FIFO would wait for a writer."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return file.read()


def write_bytes(path: Path, content: bytes) -> bool:
    """Replace a file in one step. Returns whether the operating system allowed it."""
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
