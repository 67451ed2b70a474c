"""Plan files planted by another user: none of their entries is used, and reading them does not take long."""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.store import document as document_module
from lt_runtime.store.document import LARGEST, Document, UnusableError
from lt_runtime.store.entries import ProductEntry, now, signed
from lt_runtime.store.keys import SCHEMA, to_json
from lt_runtime.store.plan_store import PlanStore
from tests.cpu.cli.conftest import Cli
from tests.support.plan_entries import H200, KEY, LATER, LAYER, OTHER, layer, product, product_key

SOMEBODY = 54321


def belongs_to_somebody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives a file or directory to another user. Without the right to do so, this process becomes another user."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def by_all(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o777)


def by_group(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o720)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_user_may_enter_or_read(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        PlanStore(path, H200).put({KEY: product()})
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (path.parents[1], *path.parent.iterdir())}
    lock = f"{path.name}.lock"
    assert {name: oct(mode) for name, mode in modes.items() if name != lock} == {"cache": "0o700", path.name: "0o600"}
    assert modes.get(lock, 0o600) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("make", [belongs_to_somebody, by_all, by_group])
def test_what_others_can_have_written_is_not_used_and_costs_one_warning(
    path: Path, filled: ProductEntry, monkeypatch: pytest.MonkeyPatch, place: int, make: Callable[..., None]
) -> None:
    make((path, *path.parents)[place], monkeypatch)
    content = path.read_bytes()
    store, entry = PlanStore(path, H200), product()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store.product(KEY) is None
        assert not store.put({OTHER: entry})
        assert store.product(OTHER) == entry, "plans work in memory"
    (warning,) = map(str, (each.message for each in caught))
    assert "is not used: `ch" in warning
    assert "LT_RUNTIME_CACHE_DIR" in warning
    assert path.read_bytes() == content


def test_a_link_in_the_place_of_the_lock_harms_nobody(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.parent.mkdir(0o700, parents=True)
    path.with_name(f"{path.name}.lock").symlink_to(victim)
    store, entry = PlanStore(path, H200), product()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (KEY, OTHER):
            store.put({key: entry})
            assert store.product(key) == entry
    assert len(caught) <= 1
    assert victim.read_text() == "precious"
    assert stat.S_ISREG(victim.stat().st_mode)


HEAD = f'{{"schema": {SCHEMA}, "fingerprint": {json.dumps(to_json(H200))}, "entries": '


def of_entries(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(f"{HEAD}{text}}}") and None


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def many_entries(path: Path) -> None:
    of_entries("{" + ",".join(f'"{number}":0' for number in range(60_000)) + "}")(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # reading /dev/zero never ends
    except PermissionError:
        fifo(path)  # only root may make devices


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (fifo, "it is no regular file"),
    "a device": (device, "it is no regular file"),
    "a directory": (lambda path: path.mkdir(), "it is no regular file"),
    "a terabyte": (sparse, f"it has more than {LARGEST} bytes"),
    "60,000 entries": (many_entries, "the digest does not fit"),
    "35,000 lists": (of_entries(f"[{','.join([nested(5)] * 7_000)}]"), "it has the parts"),
    "100,000 brackets": (of_entries("[" * 100_000), "nested too deeply"),
    "100,000 braces": (of_entries('{"a":' * 100_000), "nested too deeply"),
    "a number of 5,000 digits": (of_entries('{"a": ' + "9" * 5000 + "}"), "digits"),
    "half a character": (of_entries('{"\\ud800": 0}'), "surrogates not allowed"),
    "half a character inside": (of_entries('{"a": {"reason": "\\uDC00"}}'), "surrogates not allowed"),
    "a deep entry": (of_entries(f'{{"a": {{"strategy": {nested(900)}, "digest": ""}}}}'), "does not fit|recursion"),
    "a deep list": (of_entries(f'{{"a": {nested(900)}}}'), "digest does not fit"),
    "a number of 400 digits": (of_entries(f'{{"a": {{"us": {10**400}, "digest": ""}}}}'), "digest does not fit"),
    "no entry": (of_entries('{"a": 0}'), "digest does not fit"),
    "a version of 400 digits": (lambda path: path.write_text(f'{{"schema": {10**400}}}') and None, "its version"),
    "a negative version": (lambda path: path.write_text('{"schema": -1}') and None, "its version"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_set_aside_at_once(path: Path, make: Callable[[Path], None], message: str) -> None:
    path.parent.mkdir(0o700, parents=True)
    make(path)
    store, entry = PlanStore(path, H200), product()
    with pytest.warns(UserWarning, match=f"is damaged .*({message}).*; it is kept as") as caught:
        assert store.product(KEY) is None
    assert len(caught) == 1
    assert store.put({KEY: entry})
    assert PlanStore(path, H200).product(KEY) == entry


def test_a_full_file_loses_its_oldest_entries(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PlanStore(path, H200)
    assert store.put({KEY: product(), product_key(7): product(when="9999-01-01T00:00:00Z")})
    monkeypatch.setattr(document_module, "LARGEST", path.stat().st_size + 200)
    for rows in range(200, 212):
        assert store.put({product_key(rows): product(when=f"2026-02-01T00:00:{rows - 200:02}Z")})
        assert PlanStore(path, H200).product(product_key(rows)) is not None
    assert set(Document.read(path).raw) == {product_key(210), product_key(211)}


def planted(path: Path, key: str, **changes: Any) -> None:
    """Writes a file with one entry and its right digest, whatever its values are."""
    path.write_bytes(Document(H200, {key: signed(key, product(**changes))}).render())


HALF = '{"MatmulProblem": {"dtype": "\\ud800"}}'
JUNK: dict[str, tuple[Callable[[Path], object], str]] = {
    "junk keys": (lambda path: planted(path, "junk"), "'junk' is not the key of a problem"),
    "a key of control characters": (lambda path: planted(path, "\x1b[2J"), "is not the key of a problem"),
    "a key that holds half a character": (lambda path: planted(path, HALF), "surrogates not allowed"),
    "an entry of another kind": (lambda path: planted(path, LAYER), "another kind of problem"),
    "a value for a list": (
        lambda path: planted(path, KEY, rejected=True),
        "is damaged (rejected is True)",
    ),
    "a huge entry": (lambda path: planted(path, KEY, barred="!" * 200_000), "more than 100000 characters"),
    "UTF-16 with half a character": (
        lambda path: path.write_bytes(f'{HEAD}{{"\ud800": 0}}}}'.encode("utf-16", "surrogatepass")),
        "is damaged",
    ),
}


@pytest.mark.parametrize(("make", "message"), JUNK.values(), ids=JUNK)
def test_a_file_with_one_bad_entry_is_not_merged(
    path: Path, tmp_path: Path, make: Callable[[Path], object], message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(path.parents[1]))
    assert PlanStore(path, H200).put({OTHER: product()})
    content, theirs = path.read_bytes(), tmp_path / "theirs.json"
    make(theirs)
    status, out, err = cli("cache", "merge", theirs)
    assert (status, out, err.count("\n"), err[:-1].isprintable()) == (1, "", 1, True)
    assert message in err
    assert path.read_bytes() == content
    if theirs.read_bytes().isascii():  # an ASCII file is sound JSON
        with pytest.raises(UnusableError, match="is damaged"):
            PlanStore(path, H200).merge(Document.parse(theirs.read_bytes()))


@pytest.mark.parametrize("when", [LATER, "9999-12-31T23:59:59Z"])
@pytest.mark.parametrize("us", [0.0, 1e9])
def test_what_comes_from_elsewhere_never_outranks_a_measurement_here(path: Path, when: str, us: float) -> None:
    theirs = Document(
        H200, {KEY: signed(KEY, product(when=when, us=us)), LAYER: signed(LAYER, layer(when=when, us=us))}
    )
    first, second, store = product(), layer(), PlanStore(path, H200)
    store.put({KEY: first}, {LAYER: second})
    assert store.merge(theirs) == (0, True)
    assert (store.product(KEY), store.layer(LAYER)) == (first, second)
    later = PlanStore(path.with_name("empty.json"), H200)
    assert later.merge(theirs) == (2, True)
    first, second = product(when=now()), layer(when=now())
    later.put({KEY: first}, {LAYER: second})
    assert (later.product(KEY), later.layer(LAYER)) == (first, second)


def test_a_file_for_people_to_exchange_may_be_a_link(path: Path, filled: ProductEntry, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert Document.read(link).get(KEY) == filled
    with pytest.raises(UnusableError, match="it is no regular file"):
        Document.read(tmp_path)
