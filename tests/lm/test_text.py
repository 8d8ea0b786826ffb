"""Tests of text read from files and folders as one run of bytes: which files are taken, their order, the
part that is held out, that reads return the bytes of the files, and the errors for unusable paths.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import ConfigError, StorageError
from infinity.lm import data as text_module
from infinity.lm.data import SEPARATOR, Text, find_text

ENOUGH = b"enough to be taken\n" * 4096


def tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def content(text: Text) -> bytes:
    return text.read(0, text.nbytes)


def test_without_paths_it_is_the_standard_library() -> None:
    text = find_text(None)
    assert text.files > 300
    whole = content(text)
    assert Path(random.__file__).read_bytes() in whole
    assert b"import pytest" not in whole


def test_a_standard_library_that_is_not_there_has_a_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(text_module.sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ConfigError, match=r"python311\.zip.*--data"):
        find_text(None)


def test_the_standard_library_is_without_tests_and_other_peoples_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [
        "site-packages/a.py",
        "lib/test/b.py",
        "idlelib/idle_test/c.py",
        "lib/d.txt",
        "dist-packages/e.py",
    ]
    tree(tmp_path, {name: b"left out" for name in names} | {"lib/f.py": ENOUGH})
    monkeypatch.setattr(text_module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert content(find_text(None)) == ENOUGH


def test_hidden_binary_and_empty_files_are_left_out_of_a_folder(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "a.txt": ENOUGH,
            ".hidden": ENOUGH,
            ".git/object": ENOUGH,
            "deep/down/binary": b"text" * 2000 + b"\0" + ENOUGH,
            "empty": b"",
        },
    )
    os.mkfifo(tmp_path / "fifo")
    text = find_text([str(tmp_path)])
    assert (text.files, content(text)) == (1, ENOUGH)


def test_a_nul_byte_after_the_first_8_kib_is_not_looked_for(tmp_path: Path) -> None:
    late = b"x" * 8192 + b"\0" + ENOUGH
    tree(tmp_path, {"late": late})
    assert content(find_text([str(tmp_path)])) == late


def test_a_file_given_by_name_is_always_taken(tmp_path: Path) -> None:
    tree(tmp_path, {".hidden": b"\0" + ENOUGH})
    assert content(find_text([str(tmp_path / ".hidden")])) == b"\0" + ENOUGH


def test_links_are_followed_and_nothing_is_found_twice(tmp_path: Path) -> None:
    tree(tmp_path, {"in/a": ENOUGH, "out/b": b"from outside" + ENOUGH})
    inside = tmp_path / "in"
    (inside / "up").symlink_to(inside, target_is_directory=True)
    (inside / "beside").symlink_to(tmp_path / "out", target_is_directory=True)
    (inside / "again").symlink_to(inside / "a")
    (inside / "nowhere").symlink_to(inside / "absent")
    (inside / "self").symlink_to(inside / "self")
    text = find_text([str(inside), str(inside / "a"), str(tmp_path)])
    assert text.files == 2
    assert content(text).count(b"from outside") == 1


def test_order_and_split_follow_from_names_within_the_root(tmp_path: Path) -> None:
    files = {
        f"{folder}/{number}": f"{folder}{number}|".encode() * 200 for folder in "abc" for number in range(40)
    }
    first = find_text([str(tree(tmp_path / "here", files))])
    backwards = dict(reversed(files.items()))
    second = find_text([str(tree(tmp_path / "somewhere" / "else", backwards))])
    assert content(first) == content(second)
    assert (first.train, first.held_out) == (second.train, second.held_out)
    held_out = first.read(first.held_out.start, len(first.held_out))
    assert all(f"{folder}".encode() in held_out for folder in "abc")
    assert content(first) != SEPARATOR.join(files[name] for name in sorted(files))


def test_the_last_twentieth_is_held_out(tmp_path: Path) -> None:
    text = find_text([str(tree(tmp_path, {"a": b"x" * 100_019}))])
    assert (text.train, text.held_out) == (range(95_019), range(95_019, 100_019))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_reading_across_files_is_reading_their_concatenation(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    contents = data.draw(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6))
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / str(number) for number in range(len(contents))]
    for path, each in zip(paths, contents, strict=True):
        path.write_bytes(each)
    whole = SEPARATOR.join(contents)
    text = Text([str(path) for path in paths], [len(each) for each in contents])
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    assert text.nbytes == len(whole)
    assert text.read(start, count) == whole[start : start + count]


def test_a_file_that_became_shorter_is_an_error_that_names_it(tmp_path: Path) -> None:
    text = find_text([str(tree(tmp_path, {"a": ENOUGH}))])
    os.truncate(tmp_path / "a", 1000)
    assert text.read(0, 1000) == ENOUGH[:1000]
    with pytest.raises(StorageError, match=r"ends at byte 1000.*shorter") as caught:
        text.read(500, 1000)
    assert (caught.value.path, caught.value.offset) == (str(tmp_path / "a"), 1000)


def test_a_file_that_has_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    text = find_text([str(tree(tmp_path, {"a": ENOUGH}))])
    (tmp_path / "a").unlink()
    with pytest.raises(StorageError, match="ENOENT") as caught:
        text.read(0, 10)
    assert (caught.value.path, caught.value.errno) == (str(tmp_path / "a"), errno.ENOENT)


def test_a_file_that_cannot_be_read_is_an_error_when_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, {"a": ENOUGH, "b": ENOUGH})

    def refuses_b(path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith("b"):
            raise PermissionError(errno.EACCES, "denied", path)
        return open(path, *args, **kwargs)

    monkeypatch.setattr(text_module, "open", refuses_b, raising=False)
    with pytest.raises(StorageError, match="EACCES") as caught:
        find_text([str(tmp_path)])
    assert (caught.value.path, caught.value.errno) == (str(tmp_path / "b"), errno.EACCES)


@pytest.mark.parametrize(
    ("name", "what"), [("absent", "There is no"), ("a/below", "There is no"), ("fifo", "neither a file nor")]
)
def test_a_path_that_cannot_be_text(tmp_path: Path, name: str, what: str) -> None:
    tree(tmp_path, {"a": ENOUGH})
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=what):
        find_text([str(tmp_path / "a"), str(tmp_path / name)])


@pytest.mark.parametrize(("nbytes", "enough"), [(0, False), (40 * 1024 - 1, False), (40 * 1024, True)])
def test_too_little_text_is_refused(tmp_path: Path, nbytes: int, enough: bool) -> None:
    tree(tmp_path, {"a": b"x" * nbytes})
    if enough:
        assert len(find_text([str(tmp_path)]).held_out) == 2048
    else:
        with pytest.raises(ConfigError, match=r"40 KiB are the least.*--data"):
            find_text([str(tmp_path)])


def test_no_paths_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="Nothing holds"):
        find_text([])


def test_a_digest_tells_texts_apart_wherever_they_lie(tmp_path: Path) -> None:
    def digest(folder: str, files: dict[str, bytes]) -> str:
        for name, content in files.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
        return find_text([str(tmp_path / folder)]).digest()

    files = {f"{number}.txt": b"%d bottles\n" % number * 2000 for number in range(4)}
    first = digest("a", files)
    assert digest("b", files) == first
    assert digest("c", {**files, "2.txt": b"X" + files["2.txt"][1:]}) != first
    assert digest("d", {**files, "2.txt": files["2.txt"] + b"\n"}) != first
    assert digest("e", {"0.txt": files["0.txt"] * 4}) != first
