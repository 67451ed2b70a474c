"""The cache of compiled kernels does not use damaged, exchanged or planted files, and keeps within its size."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.files import TEMPORARY, UntrustedError
from lt_runtime.gpu import compiler
from lt_runtime.gpu.compiler import KernelCache
from lt_runtime.paths import CACHE_VARIABLE

KERNEL = ("dropout.cu", (("SCALAR", "float"),), "sm_90")
CODE = b"\x7fELF" + bytes(range(256)) * 8
SOMEBODY = 54321


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, which does not exist yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def kernels(cache: Path) -> KernelCache:
    return KernelCache(cache / "kernels")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records for which sources the compiler is called. The compiler is replaced by one that returns `CODE`."""
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
    """Gives a file or directory to another user. Without the right to do so, this process becomes another user."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at:][1:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the code": flip(-1),
    "a bit of the key": flip(30),
    "a bit of the digest": flip(100),
    "the first bit": flip(0),
    "truncated": lambda content: content[:-1],
    "truncated in the header": lambda content: content[:40],
    "empty": lambda _: b"",
    "longer": lambda content: content + b"\0",
    "machine code alone": lambda _: CODE,
    "huge": lambda content: content + bytes(compiler._LARGEST),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_kernel_is_compiled_anew_and_replaced(
    cache: Path, compiled: list[str], damage: Callable[[bytes], bytes]
) -> None:
    kernel()
    path = file_of(cache)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert [kernel(), kernel()] == [CODE, CODE]
    assert len(compiled) == 2
    assert path.read_bytes() == whole


def test_a_file_larger_than_any_kernel_is_not_read(kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.put("a", CODE)
    monkeypatch.setattr(compiler, "_LARGEST", len(CODE))
    assert kernels.get("a") is None


def test_another_kernels_file_is_not_used(cache: Path, kernels: KernelCache) -> None:
    kernels.put("a" * 64, b"code of a")
    kernels.put("b" * 64, b"code of b")
    (cache / "kernels" / f"{'b' * 64}.kernel").replace(cache / "kernels" / f"{'a' * 64}.kernel")
    assert kernels.get("a" * 64) is None


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # This is /dev/zero, whose content never ends.
    except PermissionError:  # Only root may make devices.
        os.mkfifo(path, 0o600)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), device])
def test_a_pipe_socket_or_device_is_not_read_and_replaced(
    cache: Path, compiled: list[str], make: Callable[[Path], None]
) -> None:
    kernel()
    path = file_of(cache)
    path.unlink()
    make(path)
    path.chmod(0o600)
    assert [kernel(), kernel()] == [CODE, CODE]
    assert len(compiled) == 2
    assert path.is_file()


@pytest.mark.usefixtures("compiled")
def test_a_directory_in_the_place_of_a_kernel_costs_a_warning(cache: Path) -> None:
    kernel()
    path = file_of(cache)
    path.unlink()
    path.mkdir(0o700)
    with pytest.warns(UserWarning, match="compiled anew in each process: cannot write to"):
        assert kernel() == CODE


@pytest.mark.parametrize("make", [belongs_to_somebody, lambda path, _: path.chmod(0o720)])
@pytest.mark.parametrize("place", ["", "kernels", "kernels/*"])
def test_what_others_can_have_written_is_not_used_and_costs_one_warning(
    cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, place: str, make: Callable[..., None]
) -> None:
    kernel()
    (path,) = cache.glob(place) if place else [cache]
    make(path, monkeypatch)
    if os.geteuid() == SOMEBODY:  # this process pretends to be another user, to whom no file belongs
        path = cache
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [kernel(), kernel()] == [CODE, CODE]
    (warning,) = map(str, (each.message for each in caught))
    assert warning.startswith(f"kernels are compiled anew in each process: {path} ")
    assert CACHE_VARIABLE in warning
    # Another user's file in our directory is replaced; nothing is written to another user's directory.
    assert len(compiled) == (2 if path.is_file() else 3)


def test_a_directory_whose_mode_was_mended_is_used_again(cache: Path, compiled: list[str]) -> None:
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
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == content


@pytest.mark.parametrize("foreign", ["the link", "its target"])
def test_a_link_to_a_directory_is_followed_only_if_both_are_ours(
    foreign: str, cache: Path, kernels: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(0o700)
    cache.symlink_to(target)
    kernels.put("a", CODE)
    assert kernels.get("a") == CODE
    belongs_to_somebody(cache if foreign == "the link" else target, monkeypatch)
    with pytest.raises(UntrustedError, match="who is neither you nor root"):
        kernels.get("a")


def test_files_left_by_killed_processes_are_removed_with_the_next_kernel(cache: Path, kernels: KernelCache) -> None:
    kernels.put("a", CODE)
    for name in ("a.kernel.01234567", "another.kernel.89abcdef"):
        (cache / "kernels" / f"{name}{TEMPORARY}").write_bytes(b"half")
    kernels.put("b", CODE)
    assert {path.name for path in (cache / "kernels").iterdir()} == {"a.kernel", "b.kernel"}


def test_the_least_recently_used_kernels_make_room(cache: Path, kernels: KernelCache) -> None:
    kernels.put("a", b"0123456789")
    size = (cache / "kernels" / "a.kernel").stat().st_size
    limited = KernelCache(cache, limit=2 * size + 5)
    for age, key in enumerate("abc", start=1):
        limited.put(key, b"0123456789")
        if key != "c":
            os.utime(cache / f"{key}.kernel", ns=(0, age))
        limited.get("a")
    assert [limited.get(key) is not None for key in "abc"] == [True, False, True]
    (cache / "notes.txt").write_text("other files stay" * 20)
    limited.put("d", b"0" * (2 * size))
    assert {path.name for path in cache.iterdir()} == {"kernels", "notes.txt"}


def test_a_read_only_directory_is_read(kernels: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    kernels.put("a", CODE)
    monkeypatch.setattr(compiler.os, "utime", refused)
    assert kernels.get("a") == CODE
