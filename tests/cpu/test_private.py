"""Files of the cache directory are used only if no other user can have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lt_runtime.files import UntrustedError, _require_private, make_private_directory, read_private, replace_private

ME, SOMEBODY = 12345, 54321


def status(uid: int, mode: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))


@pytest.fixture
def as_me(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)


@pytest.mark.usefixtures("as_me")
@pytest.mark.parametrize("uid", [ME, 0])
@pytest.mark.parametrize(
    "mode", [stat.S_IFREG | 0o644, *(stat.S_IFDIR | mode for mode in (0o755, 0o1777, 0o2755)), stat.S_IFLNK | 0o777]
)
def test_trusted_files(uid: int, mode: int) -> None:
    _require_private(Path("it"), status(uid, mode))


@pytest.mark.usefixtures("as_me")
@pytest.mark.parametrize(
    ("uid", "mode", "message"),
    [
        (SOMEBODY, stat.S_IFREG | 0o600, f"it belongs to user {SOMEBODY}.*`chown {ME} it`"),
        (SOMEBODY, stat.S_IFDIR | 0o1777, f"it belongs to user {SOMEBODY}"),
        (SOMEBODY, stat.S_IFLNK | 0o777, f"it belongs to user {SOMEBODY}"),
        (ME, stat.S_IFREG | 0o620, "it can be written by other users .*`chmod go-w it`"),
        (ME, stat.S_IFREG | 0o602, "it can be written by other users"),
        (ME, stat.S_IFREG | 0o1666, "it can be written by other users"),
        (0, stat.S_IFDIR | 0o775, "it can be written by other users"),
        (0, stat.S_IFDIR | 0o757, "it can be written by other users"),
    ],
)
def test_untrusted_files(uid: int, mode: int, message: str) -> None:
    with pytest.raises(UntrustedError, match=f"{message}.*LT_RUNTIME_CACHE_DIR"):
        _require_private(Path("it"), status(uid, mode))


def test_new_files_and_directories_are_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c" / "file"
    replace_private(path, b"content")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, *path.parents[:3])] == [0o600, 0o700, 0o700, 0o700]
    assert read_private(path, 7) == b"content"
    make_private_directory(path.parent)
    with pytest.raises(ValueError, match="it has more than 6 bytes"):
        read_private(path, 6)


def test_a_file_that_is_exchanged_while_opened_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, theirs = tmp_path / "file", tmp_path / "theirs"
    replace_private(path, b"content")
    theirs.write_bytes(b"theirs")
    theirs.chmod(0o666)
    opened, real = list[str](), os.open

    def open_theirs(name: Path, *arguments: int) -> int:
        opened.append(str(name))
        return real(theirs, *arguments)

    monkeypatch.setattr(os, "open", open_theirs)
    with pytest.raises(UntrustedError, match="can be written by other users"):
        read_private(path, 100)
    assert opened == [str(path)]


def test_a_public_file_is_replaced_by_a_private_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o666)
    replace_private(path, b"content")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("place", [0, 1])
def test_nothing_is_written_where_others_can_write(tmp_path: Path, place: int) -> None:
    directory = tmp_path / "cache" / "plans"
    make_private_directory(directory)
    (directory, directory.parent)[place].chmod(0o770)
    with pytest.raises(UntrustedError, match="can be written by other users"):
        replace_private(directory / "file", b"content")
    assert not [*directory.iterdir()]


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            make_private_directory(directory)
