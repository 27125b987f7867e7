"""Files are complete or missing, damaged ones are recognised, and long runs write at their pace."""

import os
import stat

import pytest
import torch

from gpext import files
from gpext.files import Pace, load, private_folder, read, read_private, save, write


def test_what_is_written_is_read(tmp_path):
    digest = write(tmp_path / "a", b"contents")
    assert read(tmp_path / "a") == (b"contents", digest)
    assert read_private(tmp_path / "a") == b"contents"
    content = {"a": torch.arange(3), "b": ("text", 1.5)}
    digest = save(content, tmp_path / "b")
    found, other = load(tmp_path / "b", ("a", "b"))
    assert torch.equal(found["a"], content["a"])
    assert (found["b"], other) == (content["b"], digest)
    assert torch.equal(torch.load(tmp_path / "b", weights_only=True)["a"], content["a"])  # torch alone can read it, too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_flipped_bit_in_any_byte_and_any_other_length_is_told(tmp_path):
    path = tmp_path / "a"
    write(path, b"some contents")
    whole = path.read_bytes()
    spoilt = [whole[:length] for length in range(len(whole))] + [whole + b"\n"]
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        spoilt.append(bytes(flipped))
    for contents in spoilt:
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="is damaged"):
            read(path)


def test_what_stood_there_stays_where_writing_fails(tmp_path, monkeypatch):
    write(tmp_path / "a", b"before")

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "a", b"after")
    assert read(tmp_path / "a")[0] == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_is_on_the_disk_before_it_is_renamed_and_its_name_after(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda h: (order.append(stat.S_IFMT(os.fstat(h).st_mode)), fsync(h)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names)))
    write(tmp_path / "a", b"contents")
    assert order == [stat.S_IFREG, "rename", stat.S_IFDIR]


def test_something_else_with_a_checksum_is_refused(tmp_path):
    write(tmp_path / "a", b"contents")
    with pytest.raises(ValueError, match="was not written by gpext"):
        load(tmp_path / "a", ("a",))
    save({"b": 1}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"expected \['a'\] in .*; got \['b'\]"):
        load(tmp_path / "a", ("a",))


def test_a_private_folder_is_made_as_one(tmp_path):
    before = os.umask(0o002)  # as on systems with a group per user
    try:
        found = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert found == (tmp_path / "a" / "b").resolve()
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (found, found.parent))


def test_what_is_no_plain_file_is_not_read(tmp_path):
    write(tmp_path / "a", b"contents")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"symbolic link|Too many levels|no plain file"):
            read_private(tmp_path / name)


class Clock:
    """Seconds that pass on request."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("draws_a_second", [0.01, 3.0, 1e3, 1e5])
@pytest.mark.parametrize("cost", [0.0, 0.01, 0.3, 4.0])
def test_a_kill_loses_no_more_than_is_said_and_writing_takes_no_more(draws_a_second, cost):
    clock = Clock()
    pace, spent, began, step = Pace(clock), 0.0, 0.0, 0.001
    allowed = max(min(10.0, 1000 / draws_a_second), 20 * cost) + step
    for _ in range(100_000):
        clock.now += step
        if pace.is_due(int((clock.now - began) * draws_a_second)):
            with pace.writing():
                clock.now += cost
            spent += cost
            began = clock.now
        assert clock.now - began <= allowed + 1 / draws_a_second
    assert spent <= cost + clock.now / 20
    assert (files._SECONDS, files._ITEMS, files._SHARE) == (10.0, 1000, 0.05)  # as in the README
