"""Compiled kernels that somebody has damaged, exchanged or planted: none of them is used."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_runtime.files import TEMPORARY
from lt_runtime.gpu import compiler, kernel_cache
from lt_runtime.gpu.kernel_cache import KernelCache
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.private import UntrustedError

KERNEL = ("dropout.cu", (("SCALAR", "float"),), "sm_90")
CODE = b"\x7fELF" + bytes(range(256)) * 8
SOMEBODY = 54321


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, which is not there yet; nothing has been said of it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that the compiler has been called for; what it makes is `CODE`."""
    calls: list[str] = []

    def compile_cubin(name: str, code: bytes, options: list[bytes]) -> bytes:
        calls.append(name)
        return CODE

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(compiler, "nvrtc_libraries", lambda: iter([Path(__file__)]))
    return calls


def kernel() -> bytes:
    return compiler.compile_kernel(*KERNEL)


def file_of(cache: Path) -> Path:
    (path,) = (cache / "kernels").iterdir()
    return path


def belongs_to_somebody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a file or directory to another user; who may not do that becomes another user instead."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_user_may_enter_or_read(cache: Path, compiled: list[str], umask: int) -> None:
    before = os.umask(umask)
    try:
        kernel()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "kernels", file_of(cache))]
    assert modes == [0o700, 0o700, 0o600]


def test_what_is_kept_is_found(cache: Path, compiled: list[str]) -> None:
    assert [kernel(), kernel()] == [CODE, CODE]
    assert len(compiled) == 1


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def flip_end(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 0x80])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the code": flip_end,
    "a bit of the key": flip(30),
    "a bit of the digest": flip(100),
    "a bit in front": flip(0),
    "truncated": lambda content: content[:-1],
    "truncated in the head": lambda content: content[:40],
    "empty": lambda _: b"",
    "longer": lambda content: content + b"\0",
    "machine code alone": lambda _: CODE,
    "huge": lambda content: content + bytes(kernel_cache._LARGEST),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_kernel_is_compiled_anew_and_replaced(
    cache: Path, compiled: list[str], damage: Callable[[bytes], bytes]
) -> None:
    kernel()
    path = file_of(cache)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kernel() == CODE
    assert len(compiled) == 2
    assert path.read_bytes() == whole
    assert kernel() == CODE
    assert len(compiled) == 2


def test_no_more_is_read_than_any_kernel_has(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KernelCache(cache / "kernels")
    kernels.put("a", CODE)
    monkeypatch.setattr(kernel_cache, "_LARGEST", len(CODE))
    assert kernels.get("a") is None


def test_another_kernels_file_is_not_used(cache: Path) -> None:
    kernels = KernelCache(cache / "kernels")
    kernels.put("a" * 64, b"code of a")
    kernels.put("b" * 64, b"code of b")
    (cache / "kernels" / f"{'b' * 64}.kernel").replace(cache / "kernels" / f"{'a' * 64}.kernel")
    assert kernels.get("a" * 64) is None


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        fifo(path)  # only root may make devices


@pytest.mark.parametrize("make", [fifo, socket, device])
def test_what_is_no_file_is_not_read_and_replaced(
    cache: Path, compiled: list[str], make: Callable[[Path], None]
) -> None:
    kernel()
    path = file_of(cache)
    path.unlink()
    make(path)
    assert kernel() == CODE
    assert len(compiled) == 2
    assert path.is_file()
    kernel()
    assert len(compiled) == 2


def test_a_directory_in_the_place_of_a_kernel_costs_a_warning(cache: Path, compiled: list[str]) -> None:
    kernel()
    path = file_of(cache)
    path.unlink()
    path.mkdir(0o700)
    with pytest.warns(UserWarning, match="compiled anew in each process: cannot write to"):
        assert kernel() == CODE


def by_all(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o777)


def by_group(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o720)


UNTRUSTED = {
    "belongs to somebody": (belongs_to_somebody, f"belongs to user {SOMEBODY}, who is neither|neither you nor root"),
    "can be written by all": (by_all, "can be written by other users and is not used: `chmod go-w "),
    "can be written by a group": (by_group, "can be written by other users and is not used: `chmod go-w "),
}
PLACES: dict[str, Callable[[Path], Path]] = {
    "the cache directory": lambda cache: cache,
    "the kernels' directory": lambda cache: cache / "kernels",
    "a kernel": file_of,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("make", "message"), UNTRUSTED.values(), ids=UNTRUSTED)
def test_what_others_can_have_written_is_not_used_and_costs_one_warning(
    cache: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path], Path],
    make: Callable[[Path, pytest.MonkeyPatch], None],
    message: str,
) -> None:
    kernel()
    path = place(cache)
    make(path, monkeypatch)
    if os.geteuid() == SOMEBODY:  # then all of it is foreign
        path = cache
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [kernel(), kernel()] == [CODE, CODE]
    (warning,) = map(str, (each.message for each in caught))
    assert warning.startswith("kernels are compiled anew in each process: ")
    assert any(part in warning for part in message.split("|"))
    assert CACHE_VARIABLE in warning
    assert str(path) in warning
    # A file in a directory of ours is replaced; nothing is written to a directory that is not.
    assert len(compiled) == (2 if path.is_file() else 3)


def test_what_was_mended_is_used_again(cache: Path, compiled: list[str]) -> None:
    kernel()
    cache.chmod(0o775)
    with pytest.warns(UserWarning, match="chmod go-w"):
        kernel()
    cache.chmod(0o755)
    kernel()
    assert len(compiled) == 2


def test_a_symbolic_link_is_not_followed(cache: Path, compiled: list[str], tmp_path: Path) -> None:
    kernel()
    path, elsewhere = file_of(cache), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    content = elsewhere.read_bytes()
    with pytest.warns(UserWarning, match=f"{path.name} is a symbolic link and is not used: `rm "):
        assert kernel() == CODE
    assert len(compiled) == 2
    assert path.is_file()
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == content


def test_a_foreign_link_to_a_directory_of_ours_is_not_followed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    kernels = KernelCache(cache / "kernels")
    kernels.put("a", CODE)  # our own link is followed
    assert kernels.get("a") == CODE
    belongs_to_somebody(cache, monkeypatch)
    with pytest.raises(UntrustedError, match="who is neither you nor root"):
        kernels.get("a")


def test_our_link_to_a_foreign_directory_is_not_followed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    kernels = KernelCache(cache / "kernels")
    kernels.put("a", CODE)
    belongs_to_somebody(tmp_path / "elsewhere", monkeypatch)
    with pytest.raises(UntrustedError, match="who is neither you nor root"):
        kernels.get("a")


def test_a_sticky_directory_can_hold_ours(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o1777)  # as /tmp: nobody else can replace what is ours in there
    kernels = KernelCache(cache / "kernels")
    kernels.put("a", CODE)
    assert kernels.get("a") == CODE


def test_what_killed_processes_left_goes_with_the_next_kernel(cache: Path) -> None:
    kernels = KernelCache(cache / "kernels")
    kernels.put("a", CODE)
    for name in ("a.kernel.01234567", "another.kernel.89abcdef"):
        (cache / "kernels" / f"{name}{TEMPORARY}").write_bytes(b"half")
    kernels.put("b", CODE)
    assert {path.name for path in (cache / "kernels").iterdir()} == {"a.kernel", "b.kernel"}
