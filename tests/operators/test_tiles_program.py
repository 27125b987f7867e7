"""The program of compiled tiles: compiled, cached, verified when loaded, or replaced by torch with a warning."""

import os
import shlex
import shutil
import stat
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from gpext.files import read_private
from gpext.operators import KernelOperator, compiled_tiles, tiles_program
from tests.operators.test_compiled_tiles import F64, assert_threads_agree, factors_of


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The program, compiled for real."""
    kept = Path(tiles_program.program()._name)
    if kept.exists():
        return kept
    path = tmp_path_factory.mktemp("real") / "tiles.so"
    tiles_program._compile(shlex.split(os.environ.get("CXX", "c++")), path)
    return path


class Machine:
    """A machine without the program, and with only the simulated compilers."""

    def __init__(self, root, real, monkeypatch):
        self.root, self.real, self.monkeypatch = root, real, monkeypatch
        self.commands, self.cache = root / "commands", root / "cache"
        self.commands.mkdir()
        self.log = root / "log"
        monkeypatch.setenv("PATH", str(self.commands))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.cache))

    def has(self, name, script):
        path = self.commands / name
        path.write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\necho {name} >> {self.log}\n{script}\n")
        path.chmod(0o755)
        return path

    def compiler(self, name="c++"):
        return self.has(name, f'while [ "$1" != -o ]; do shift; done\ncp {self.real} "$2"')

    @property
    def calls(self):
        """The compilers that were run, in order."""
        return self.log.read_text().split() if self.log.exists() else []

    @property
    def kept(self):
        """The file of the program."""
        (path,) = (self.cache / "gpext").iterdir()
        return path

    def program(self):
        """The program that another process would get."""
        return tiles_program.program.__wrapped__()

    def silently(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return self.program()


@pytest.fixture
def machine(tmp_path, real, monkeypatch):
    return Machine(tmp_path, real, monkeypatch)


def test_it_is_compiled_once_and_then_needs_no_compiler(machine):
    compiler = machine.compiler()
    assert machine.silently() is not None
    assert machine.calls == ["c++"]
    compiler.unlink()
    assert machine.silently()._name == str(machine.kept)
    assert machine.calls == ["c++"]


def test_what_is_kept_is_closed_to_others(machine):
    before = os.umask(0)
    try:
        machine.compiler()
        machine.program()
    finally:
        os.umask(before)
    for path in (machine.cache, machine.cache / "gpext"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    machine.silently()
    assert machine.calls == ["c++"]


FAILING = {
    "fails": "echo kaputt >&2; exit 1",
    "latin": r"printf '\377\376 kaputt\n' >&2; exit 1",
    "makes nothing": "exit 0",
    "makes no program": 'while [ "$1" != -o ]; do shift; done\necho text > "$2"',
    "makes another program": 'while [ "$1" != -o ]; do shift; done\ncp /bin/sh "$2"',
}


@pytest.mark.parametrize("fault", FAILING)
def test_the_next_compiler_is_tried_where_one_does_not_work(fault, machine):
    machine.has("c++", FAILING[fault])
    machine.compiler("g++")
    assert machine.silently() is not None
    assert list(dict.fromkeys(machine.calls)) == ["c++", "g++"]


@pytest.mark.parametrize("fault", FAILING)
def test_without_one_that_works_there_is_one_warning_and_torch_serves(fault, machine):
    machine.has("c++", FAILING[fault])
    machine.monkeypatch.setattr(compiled_tiles, "program", cache(tiles_program.program.__wrapped__))
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    op = KernelOperator(torch.ones(1, 1, dtype=F64), x, profiles=("rbf",), square=True, backend="tiles")
    with pytest.warns(tiles_program.NotCompiledWarning, match=r"c\+\+ (failed|makes no program)") as said:
        found, _ = (op @ x for _ in range(2))
    assert len(said) == 1
    torch.testing.assert_close(found, op.to_dense() @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("named", ["", " ", 'g++ "', "no-such-compiler", "false", "'' -x", "/"])
def test_others_are_tried_where_cxx_names_none_that_works(named, machine):
    machine.monkeypatch.setenv("CXX", named)
    with pytest.warns(tiles_program.NotCompiledWarning, match="found no C.. compiler"):
        assert machine.program() is None
    machine.has("false", "exit 1")
    machine.compiler("clang++")
    assert machine.silently() is not None


def test_cxx_comes_first_with_its_options(machine):
    machine.compiler("mine")
    machine.compiler()
    machine.monkeypatch.setenv("CXX", "mine --option")
    assert machine.silently() is not None
    assert machine.calls == ["mine"]


def spoil(path, fault):
    contents = bytearray(path.read_bytes())
    if fault == "truncated":
        contents = contents[:9000]
    if fault == "empty":
        contents = b""
    if fault == "flipped":
        contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    if fault == "writable":
        path.chmod(0o662)
    if fault == "link":
        shutil.move(path, path.with_name("elsewhere"))
        path.symlink_to("elsewhere")


@pytest.mark.parametrize("fault", ["truncated", "empty", "flipped", "writable", "link"])
def test_a_program_that_cannot_be_trusted_is_compiled_anew(fault, machine):
    machine.compiler()
    machine.program()
    path = machine.kept
    whole = path.read_bytes()
    spoil(path, fault)
    assert machine.silently() is not None
    assert machine.calls == ["c++", "c++"]
    assert path.read_bytes() == whole
    assert not path.is_symlink()
    assert not path.stat().st_mode & 0o022
    assert machine.silently() is not None
    assert machine.calls == ["c++", "c++"]


def test_what_another_user_owns_is_not_loaded(machine, monkeypatch):
    machine.compiler()
    machine.program()
    path, other = machine.kept, os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match=f"{path} cannot be trusted: it belongs to the user with the id"):
        read_private(path)
    with pytest.warns(tiles_program.NotKeptWarning, match="gpext cannot be trusted: it belongs to"):
        assert machine.program() is not None
    assert machine.calls == ["c++", "c++"]


@pytest.mark.parametrize("which", ["folder", "parent"])
def test_a_folder_that_others_may_write_to_is_not_used(which, machine):
    machine.compiler()
    machine.program()
    (machine.cache / "gpext" if which == "folder" else machine.cache).chmod(0o777)
    with pytest.warns(tiles_program.NotKeptWarning, match="others may write to"):
        assert machine.program() is not None
    assert machine.calls == ["c++", "c++"]
    machine.cache.chmod(0o1777)  # as /tmp: users can move only their own files
    (machine.cache / "gpext").chmod(0o700)
    assert machine.silently() is not None


def test_links_on_the_way_are_followed_before_anything_is_checked(machine):
    machine.compiler()
    aside = machine.root / "aside"
    aside.mkdir(mode=0o777)
    aside.chmod(0o777)
    machine.cache.symlink_to(aside)
    with pytest.warns(tiles_program.NotKeptWarning, match=f"others may write to {aside}"):
        assert machine.program() is not None


def test_a_relative_cache_is_ignored(machine, monkeypatch):
    machine.compiler()
    monkeypatch.chdir(machine.root)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(machine.root / "home"))
    (machine.root / "home").mkdir()
    assert machine.silently() is not None
    assert not (machine.root / "relative").exists()
    assert len(list((machine.root / "home" / ".cache" / "gpext").iterdir())) == 1


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_it_serves_this_process(home, machine, monkeypatch):
    machine.compiler()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")

    def none_known(*_):
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", none_known)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.warns(tiles_program.NotKeptWarning, match="there is no folder to keep it in: .*XDG_CACHE_HOME"):
        assert machine.program() is not None
    shutil.rmtree(machine.commands)
    with pytest.warns(tiles_program.NotCompiledWarning, match="there is no folder .*found no C.. compiler"):
        assert machine.program() is None


def test_a_folder_that_cannot_be_made_is_named(machine):
    machine.compiler()
    machine.cache.touch()
    with pytest.warns(tiles_program.NotKeptWarning, match=f"{machine.cache}.*XDG_CACHE_HOME can name another"):
        assert machine.program() is not None


def test_it_is_on_the_disk_before_it_has_its_name(machine, monkeypatch):
    machine.compiler()
    order = []
    for name in ("fsync", "replace"):
        true = getattr(os, name)

        def noted(*args, name=name, true=true):
            order.append(name)
            return true(*args)

        monkeypatch.setattr(os, name, noted)
    machine.program()
    assert order == ["fsync", "replace", "fsync"]


def test_it_is_said_once(machine):
    tiles_program.program.cache_clear()
    try:
        with pytest.warns(tiles_program.NotCompiledWarning):
            assert not compiled_tiles.serves(factors_of("rbf"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not compiled_tiles.serves(factors_of("rbf"))
    finally:
        tiles_program.program.cache_clear()


@pytest.mark.slow
def test_threads_without_openmp(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    real = os.environ.get("CXX", "c++")
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_tiles, "program", cache(tiles_program.program.__wrapped__))
    assert_threads_agree()
