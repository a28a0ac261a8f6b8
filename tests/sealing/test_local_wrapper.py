"""Master keys from a file or from the environment."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sagas.errors import InvalidInput, KeyLost, Tampered
from sagas.wrapping import KeyName, LocalKeyWrapper, Wrapped, add_master_key
from tests.sealing.wrapping import KEY, NAME, OTHER_NAMES

OLD, NEW = bytes([1]) * 32, bytes([2]) * 32


def line(name: str, key: bytes) -> str:
    return f"{name}:{base64.b64encode(key).decode()}"


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# --- wrapping ---------------------------------------------------------------------------------------------------------


async def test_a_wrapped_key_unwraps_under_its_name() -> None:
    wrapper = LocalKeyWrapper({"2026": NEW})
    wrapped = await wrapper.wrap(NAME, KEY)
    assert wrapped.master == "2026"
    assert KEY not in wrapped.wrapped
    assert len(wrapped.wrapped) == 61
    assert await wrapper.unwrap(NAME, wrapped) == KEY


async def test_it_is_what_it_always_was() -> None:
    nonce = bytes(range(12))
    wrapped = await LocalKeyWrapper({"2026": NEW}, random_bytes=lambda _: nonce).wrap(NAME, KEY)
    bound = b'{"application":"mongo-sagas","key_id":"0123456789abcdef","purpose":"data","tenant":"vinet"}'
    assert wrapped.wrapped == b"\x01" + nonce + AESGCM(NEW).encrypt(nonce, KEY, bound)
    assert wrapped.wrapped.hex() == (
        "01000102030405060708090a0b2a698c9ba330a06418ba6074e7ca00887351a6ec723ae7bc19020afbb07a77ec92d075df1a3a18f08482"
        "aa2321da102d"
    )


@pytest.mark.parametrize("other", OTHER_NAMES, ids=str)
async def test_under_another_name_it_does_not_unwrap(other: KeyName) -> None:
    wrapper = LocalKeyWrapper({"2026": NEW})
    with pytest.raises(Tampered, match="do not authenticate"):
        await wrapper.unwrap(other, await wrapper.wrap(NAME, KEY))


async def test_no_altered_bit_goes_unnoticed() -> None:
    wrapper = LocalKeyWrapper({"2026": NEW})
    good = (await wrapper.wrap(NAME, KEY)).wrapped
    for position in range(len(good) * 8):
        altered = bytearray(good)
        altered[position // 8] ^= 1 << position % 8
        with pytest.raises(Tampered):
            await wrapper.unwrap(NAME, Wrapped("2026", bytes(altered)))
    for length in range(len(good)):
        with pytest.raises(Tampered):
            await wrapper.unwrap(NAME, Wrapped("2026", good[:length]))


async def test_the_newest_master_key_wraps_and_the_older_ones_still_unwrap() -> None:
    by_old = await LocalKeyWrapper({"2025": OLD}).wrap(NAME, KEY)
    both = LocalKeyWrapper({"2025": OLD, "2026": NEW})
    assert await both.unwrap(NAME, by_old) == KEY
    assert (await both.wrap(NAME, KEY)).master == "2026"
    with pytest.raises(KeyLost, match="'2025' is not among those given here"):
        await LocalKeyWrapper({"2026": NEW}).unwrap(NAME, by_old)


async def test_another_master_key_under_the_same_name_is_told_from_a_missing_one() -> None:
    wrapped = await LocalKeyWrapper({"2026": OLD}).wrap(NAME, KEY)
    with pytest.raises(Tampered, match="or another master key was called '2026'"):
        await LocalKeyWrapper({"2026": NEW}).unwrap(NAME, wrapped)


def test_names_of_keys_never_run_into_each_other() -> None:
    names = [
        NAME,
        *OTHER_NAMES,
        KeyName(tenant='vinet","x":"', key_id=NAME.key_id, purpose="data"),
        KeyName(tenant="", key_id=NAME.key_id, purpose="data"),
        KeyName(tenant="ü", key_id=NAME.key_id, purpose="data"),
    ]
    assert len({name.as_bytes() for name in names}) == len(names)


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_a_new_file_is_the_owners_alone_and_every_key_added_wraps_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "master-keys"
    old_umask = os.umask(0)
    try:
        first = add_master_key(path, "2025")
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    wrapped = await first.wrap(NAME, KEY)
    second = add_master_key(path, "2026")
    assert (await second.wrap(NAME, KEY)).master == "2026"
    assert await LocalKeyWrapper.from_file(path).unwrap(NAME, wrapped) == KEY
    assert len(path.read_text().splitlines()) == 2


def test_a_file_without_a_last_newline_is_added_to_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys", "# ours\n" + line("2025", OLD))
    assert repr(add_master_key(path, "2026")) == "LocalKeyWrapper(2025, 2026)"


def test_a_name_that_is_taken_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys", line("2026", NEW) + "\n")
    with pytest.raises(InvalidInput, match="has a master key '2026' already"):
        add_master_key(path, "2026")
    assert path.read_text() == line("2026", NEW) + "\n"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "keys", line("2026", NEW), mode)
    with pytest.raises(InvalidInput, match=f"others may use it \\(mode {mode:o}\\); chmod 600 it"):
        LocalKeyWrapper.from_file(path)
    with pytest.raises(InvalidInput, match="others may use it"):
        add_master_key(path, "2027")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_the_owner_alone_is_accepted(tmp_path: Path, mode: int) -> None:
    LocalKeyWrapper.from_file(key_file(tmp_path / "keys", line("2026", NEW), mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys", line("2026", NEW))
    os.chown(path, 12345, -1)
    with pytest.raises(InvalidInput, match="belongs to user 12345"):
        LocalKeyWrapper.from_file(path)


def test_a_link_is_as_good_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(key_file(tmp_path / "a", line("2026", NEW)))
    (tmp_path / "bad").symlink_to(key_file(tmp_path / "b", line("2026", NEW), 0o644))
    LocalKeyWrapper.from_file(tmp_path / "good")
    with pytest.raises(InvalidInput, match="others may use it"):
        LocalKeyWrapper.from_file(tmp_path / "bad")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        LocalKeyWrapper.from_file(tmp_path / "missing")
    with pytest.raises(InvalidInput, match="cannot be read"):
        LocalKeyWrapper.from_file(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be written"):
        add_master_key(tmp_path / "missing" / "keys", "2026")


# --- what it says -----------------------------------------------------------------------------------------------------

GOOD = line("2026", NEW)
WRONG = {
    "": "holds no master key",
    "# only a comment\n": "holds no master key",
    base64.b64encode(NEW).decode(): "entry 1 is not NAME:BASE64",
    f"{GOOD}\n2027:": "entry 2 is not NAME:BASE64",
    f"{GOOD}\n2027:!!!": "entry 2 is not NAME:BASE64",
    f"{GOOD}\n" + line("2027", NEW[:31]): "entry 2 is not NAME:BASE64",
    f"{GOOD}\n" + line("2027", NEW + NEW): "entry 2 is not NAME:BASE64",
    f"{GOOD}\n" + line("two words", NEW): "entry 2 is not NAME:BASE64",
    f"{GOOD}\n" + line("", NEW): "entry 2 is not NAME:BASE64",
    f"{GOOD}\n{GOOD}": "entry 2 has a name that stands there already",
    "x" * 100_000: "is larger than",
    "\u00fc:" + base64.b64encode(NEW).decode(): "entry 1 is not NAME:BASE64-OF-32",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_a_wrong_file_is_refused_by_place_and_without_its_content(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=WRONG[text]) as refused:
        LocalKeyWrapper.from_file(key_file(tmp_path / "keys", text))
    assert base64.b64encode(NEW).decode()[:8] not in str(refused.value)


async def test_the_environment_takes_commas_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGAS_MASTER_KEYS", f"{line('2025', OLD)}, {line('2026', NEW)}")
    wrapper = LocalKeyWrapper.from_env()
    assert (await wrapper.wrap(NAME, KEY)).master == "2026"
    assert repr(wrapper) == "LocalKeyWrapper(2025, 2026)"


@pytest.mark.parametrize(("value", "problem"), [(None, "is not set"), ("", "is not set"), ("x", "entry 1 is not")])
def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None, problem: str) -> None:
    monkeypatch.delenv("OTHER_KEYS", raising=False)
    if value is not None:
        monkeypatch.setenv("OTHER_KEYS", value)
    with pytest.raises(InvalidInput, match=f"OTHER_KEYS: {problem}"):
        LocalKeyWrapper.from_env("OTHER_KEYS")


@pytest.mark.parametrize("masters", [{}, {"a b": NEW}, {"2026": NEW[:16]}])
def test_wrong_master_keys_are_refused(masters: dict[str, bytes]) -> None:
    with pytest.raises(InvalidInput):
        LocalKeyWrapper(masters)
