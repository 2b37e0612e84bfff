"""Tests of `dlcmd put`: the places of entries, refusals, and the output."""

import base64
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from contextlib import chdir, suppress
from pathlib import Path

from dlcmd.show.output import count_text
from dlcmd.show.progress import progress_json
from tests.ingest.test_tar import tar_of
from tests.processes import state_of
from tests.rows import each_row
from tests.trees import facts, odd_tree, write

from ..waiting import wait_until
from .conftest import Dlcmd


def wait_for_reader(pipe: int, pid: int) -> None:
    def has_read_all() -> bool:
        unread = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
        return not unread and state_of(pid) == "S"

    wait_until(has_read_all)


def test_a_folder_is_put_once(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"22"})
    result = dlcmd("put", source, "pets")
    assert result.out.startswith(b"put 2 files (3 B) in ")
    assert result.err == ""
    assert b"put 0 files (0 B) in 0 chunks; 4 unchanged" in dlcmd("put", source, "pets").out
    assert dlcmd("ls", "-R", "pets").out == b"a\nsub\nsub/b\n"


def test_odd_names_survive_put_and_get(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "src")
    dlcmd("put", source, "odd")
    dlcmd("get", "odd", tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)
    assert (tmp_path / "out/empty").stat().st_mode & 0o7777 == 0o755  # 4755 loses its other bits


@each_row(
    ("address", "path"),
    [
        ("plain", "cat.jpg"),
        ("slash/", "cat.jpg"),
        ("named/dog.jpg", "dog.jpg"),
        ("folder/new/", "new/cat.jpg"),
        ("file/new", "new"),
        ("into/there", "there/cat.jpg"),
    ],
)
def test_a_file_is_named_by_address(dlcmd: Dlcmd, tmp_path: Path, address: str, path: str) -> None:
    dataset = address.partition("/")[0]
    dlcmd("put", write(tmp_path / "src", {"there/old": b""}), dataset)
    (tmp_path / "cat.jpg").write_bytes(b"meow")
    (tmp_path / "cat.jpg").chmod(0o640)
    done = dlcmd("put", "--json", tmp_path / "cat.jpg", address).objects[-1]
    assert (done["files"], done["bytes"]) == (1, 4)
    assert dlcmd("cat", f"{dataset}/{path}").out == b"meow"
    assert b"-rw-r-----" in dlcmd("ls", "-l", f"{dataset}/{path}").out
    done = dlcmd("put", "--json", tmp_path / "cat.jpg", address).objects[-1]
    assert (done["files"], done["unchanged"]) == (0, 1)


def test_a_file_never_hides_a_folder_nor_lies_below_a_file(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"folder/x/old": b"", "file": b""})
    dlcmd("put", source, "pets")
    file = tmp_path / "x"
    file.write_bytes(b"new")
    assert "x is a folder of the dataset" in dlcmd("put", file, "pets/folder/", code=12).err
    assert "file is a file of the dataset" in dlcmd("put", file, "pets/file/", code=12).err
    assert ".diesel" in dlcmd("put", file, "pets/.diesel", code=2).err
    assert dlcmd("ls", "-R", "pets").out == b"file\nfolder\nfolder/x\nfolder/x/old\n"


def test_delete_deletes_what_the_source_no_longer_has(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"2"})
    dlcmd("put", source, "pets")
    (source / "sub/b").unlink()
    (source / "sub").rmdir()
    assert b"would put 1 entry and delete 2" in dlcmd("put", "-n", "--delete", source, "pets").out
    assert dlcmd("ls", "-R", "pets").out == b"a\nsub\nsub/b\n"
    dlcmd("put", "--delete", source, "pets")
    assert dlcmd("ls", "-R", "pets").out == b"a\n"
    (source / "a").unlink()
    dlcmd("put", "--delete", source, "pets")
    assert dlcmd("ls", "-R", "pets").out == b"a\n"
    dlcmd("put", "--delete", "--allow-empty", source, "pets")
    assert dlcmd("ls", "-R", "pets").out == b""


def test_a_dry_run_changes_nothing_on_disk(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1"})
    assert b"would put 2 entries" in dlcmd("put", "-n", source, "pets").out
    assert not dlcmd.store.exists()
    strange = write(tmp_path / "strange", {"x": b""}).as_uri()
    dlcmd("--url", strange, "put", "-n", source, "pets", code=13)
    dlcmd("put", source, "other")
    before = sorted(dlcmd.store.rglob("*"))
    assert b"would put 2 entries" in dlcmd("put", "-n", source, "pets").out
    assert b"would put 1 entry" in dlcmd("put", "-n", source / "a", "pets/b").out
    assert sorted(dlcmd.store.rglob("*")) == before
    dlcmd("ls", "pets", code=10)


def test_a_dry_run_names_what_would_be_deleted(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """It names the first ten, with -v or --json all."""
    gone = [b"old", *(b"old/%02d" % i for i in range(11)), b"old/\xff"]
    before = {"kept": b"1"} | {os.fsdecode(path): b"" for path in gone[1:]}
    dlcmd("put", write(tmp_path / "before", before), "pets")
    source = str(write(tmp_path / "src", {"kept": b"1"}))
    words = ["put", "-n", "--delete", source, "pets"]
    lines = [b"would delete " + path for path in gone]
    shown = [*lines[:10], b"... and 3 more; -v shows all of them"]
    assert dlcmd(*words).out.splitlines()[1:] == shown
    assert dlcmd("-v", *words).out.splitlines()[1:] == lines
    *events, done = dlcmd("--json", *words).objects
    assert {each["event"] for each in events} == {"would delete"}
    assert [each["path"] for each in events[:-1]] == [path.decode() for path in gone[:-1]]
    assert events[-1]["path_b64"] == base64.b64encode(gone[-1]).decode()
    assert (done["event"], done["deleted"]) == ("done", 13)
    assert dlcmd("-q", *words).out == b""
    assert b"would delete" not in dlcmd("put", "-n", *words[3:]).out
    assert len(dlcmd("ls", "-R", "pets").out.splitlines()) == 14


@each_row(("kind", "stripped", "links"), [("file", 1, 1), ("folder", 4, 4), ("tar", 3, 2)])
def test_put_notes_special_mode_bits_and_hard_links_that_are_not_kept(
    dlcmd: Dlcmd, tmp_path: Path, kind: str, stripped: int, links: int
) -> None:
    """The note is one line, about the entries that were put now."""
    source = write(tmp_path / "src", {"su/passwd": b"1", "su/large": bytes(200_000), "plain": b"2"})
    for name, mode in (("passwd", 0o4755), ("large", 0o2711), ("", 0o1777)):
        (source / "su" / name).chmod(mode)
    os.link(source / "plain", source / "linked")
    os.link(source / "su/passwd", source / "su/other")
    subprocess.run(["tar", "cf", tmp_path / "a.tar", "-C", source, "."], check=True)
    all_words: dict[str, list[str | Path]] = {
        "file": ["put", source / "su/passwd", "file/passwd"],
        "folder": ["put", "--chunk-size", "64K", source, "folder"],
        "tar": ["put", "--tar", tmp_path / "a.tar", "tar"],
    }
    words = all_words[kind]
    note = (
        f"note: set-user-ID, set-group-ID and sticky bits of {count_text(stripped, 'entry')} are"
        f" not kept; {count_text(links, 'hard link')} became files of their own"
    )
    assert dlcmd(*words).out.decode().splitlines()[1:] == [note]
    assert dlcmd(*words).out.count(b"\n") == 1
    dlcmd("delete-dataset", kind, "--yes")
    done = dlcmd("--json", *words).objects[-1]
    assert (done["stripped"], done["hard_links"]) == (stripped, links)


def test_progress_counts_a_large_file_once(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """Entries and not extents: otherwise it would show 17 of 2."""
    source = write(tmp_path / "src", {"big": os.urandom(1 << 20)})
    done = dlcmd("--json", "put", "--chunk-size", "64K", source, "pets").objects[-1]
    assert (done["entries"], done["chunks"]) == (2, 16)


def test_only_the_paths_of_files_from_are_put(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"", "b": b"", "new\nline": b"", "sub/c": b""})
    names = tmp_path / "names"
    names.write_bytes(b"./a\n\nsub/c\n")
    dlcmd("put", "--files-from", names, source, "pets")
    assert dlcmd("ls", "-R", "pets").out == b"a\nsub\nsub/c\n"
    dlcmd.program("put", "--files-from", "-", "-0", source, "nul", stdin=b"new\nline\0b\0")
    assert dlcmd("ls", "nul").out == b"b\nnew\nline\n"
    names.write_bytes(b".\n./sub\n./sub/c\n././b\n")  # as `find .` writes them
    dlcmd("put", "--files-from", names, source, "found")
    assert dlcmd("ls", "-R", "found").out == b"b\nsub\nsub/c\n"
    os.utime(source, ns=(0, 5))
    dlcmd("put", "--files-from", names, source, "found")
    dlcmd("get", "found", tmp_path / "back")
    assert (tmp_path / "back").stat().st_mtime_ns == 5
    for bad, code, message in ((b"../a\n", 2, "'..'"), (b"gone\n", 3, "gone: No such file")):
        names.write_bytes(bad)
        assert message in dlcmd("put", "--files-from", names, source, "pets", code=code).err
    dlcmd("put", "--files-from", names, "--delete", source, "pets", code=2)
    assert "no file" in dlcmd("put", "--files-from", "nowhere", source, "pets", code=10).err


def test_include_and_exclude_choose_files(dlcmd: Dlcmd, tmp_path: Path) -> None:
    files = dict.fromkeys(["a.txt", "b.jpg", "cache/x.jpg", "d/c.jpg"], b"")
    names = write(tmp_path / "lists", {"names": "".join(f"./{n}\n" for n in files).encode()})
    filters = ("--exclude", "cache", "--include", "*.jpg", write(tmp_path / "src", files))
    for dataset, more in (("pets", []), ("named", ["--files-from", str(names / "names")])):
        dlcmd("put", *more, *filters, dataset)
        assert dlcmd("ls", "-R", dataset).out == b"b.jpg\nd\nd/c.jpg\n"
    for words in (["--exclude", "*"], ["--include", "*.png"], ["-n", "--exclude", "*"]):
        message = dlcmd("put", *words, tmp_path / "src", "none").err
        assert f"--include and --exclude leave out all files of {tmp_path / 'src'}" in message
    assert dlcmd("put", "--exclude", "*", tmp_path / "src/a.txt", "one").err == ""


def test_checksum_finds_a_change_that_size_and_mtime_hide(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"old"})
    dlcmd("put", source, "pets")
    before = (source / "a").stat().st_mtime_ns
    (source / "a").write_bytes(b"new")
    os.utime(source / "a", ns=(before, before))
    dlcmd("put", source, "pets")
    assert dlcmd("cat", "pets/a").out == b"old"
    dlcmd("put", "--checksum", source / "a", "pets/a")
    assert dlcmd("cat", "pets/a").out == b"new"


def test_bad_entries_are_named_and_the_others_are_put(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a": b"1"})
    os.mkfifo(source / "pipe")
    result = dlcmd("put", source, "pets", code=3)
    assert "dlcmd: pipe: skipped" in result.err
    assert "1 entry could not be put" in result.err.splitlines()[-1]
    result = dlcmd("put", "--json", source, "pets", code=3)
    done = result.objects[-1]
    assert done["failed"] == [{"path": "pipe", "reason": "skipped: a pipe, socket or device"}]
    assert '"error": "PartialError"' in result.err.splitlines()[-1]
    assert dlcmd("ls", "pets").out == b"a\n"


@each_row(
    "arguments",
    [
        *(["--chunk-size", bad] for bad in ("0", "1", "-1", "1T", "NaN", "\u0664M")),
        *(["--jobs", bad] for bad in ("0", "-1", "1000000", "two")),
        *(["--compress", "zip"], ["--include", ""], ["-0"], ["--no-such-option"]),
    ],
)
def test_I13_bad_values_are_refused(dlcmd: Dlcmd, tmp_path: Path, arguments: list[str]) -> None:
    source = write(tmp_path / "src", {"a": b"1"})
    result = dlcmd("put", *arguments, source, "pets", code=2)
    assert len(result.err.splitlines()) == 1
    dlcmd("put", "--chunk-size", "64k", "--jobs", "1", source, "pets")


@each_row(
    ("words", "code", "complaint"),
    [
        ([], 2, "SRC and DATASET"),
        (["src"], 2, "SRC and DATASET"),
        (["src", "pets", "more"], 2, "3 arguments"),
        (["--tar", "-", "src", "pets"], 2, "DATASET"),
        (["s3://bucket/a//b", "pets"], 2, "empty or dotted parts"),
        (["s3://", "pets"], 2, "no bucket"),
        (["--files-from", "-", "s3://bucket/a", "pets"], 2, "not a bucket"),
        (["src", "pets@3"], 2, "the current version only"),
        (["src", "pets/../x"], 2, "'..'"),
        (["gone", "pets"], 10, "there is no file or folder gone"),
        (["--tar", "gone", "pets"], 10, "there is no file gone"),
        (["/dev/null", "pets"], 2, "neither a file nor a folder"),
        (["--files-from", "/nonexistent", "src", "pets"], 10, "no file"),
        (["--files-from", "src/a", "src/a", "pets"], 2, "src/a"),
        (["--url", "ftp://x", "src", "pets"], 2, "unknown scheme"),
    ],
)
def test_bad_arguments_are_refused(
    dlcmd: Dlcmd, tmp_path: Path, words: list[str], code: int, complaint: str
) -> None:
    write(tmp_path / "src", {"a": b"1"})
    with chdir(tmp_path):
        result = dlcmd("put", *words, code=code)
    assert complaint in result.err
    assert len(result.err.splitlines()) == 1
    assert not dlcmd.store.exists()


def test_a_tar_is_put_from_a_file_or_a_pipe(dlcmd: Dlcmd, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(("x", b"1"), ("sub/y", b"2")))
    assert b"put 2 files" in dlcmd("put", "--tar", tmp_path / "a.tar", "pets/in").out
    assert dlcmd("ls", "-R", "pets").out == b"in\nin/sub\nin/x\nin/sub/y\n"
    whole = tar_of(("x", b"1" * 1000), ("z", b"2" * 1000))
    result = dlcmd.program("put", "--tar", "-", "pets", stdin=whole[:2500], code=3)
    assert "dlcmd: -: the tar is damaged or cut off, after z" in result.err
    assert dlcmd("cat", "pets/x").out == b"1" * 1000
    result = dlcmd.program("put", "--tar", "-", "pets", stdin=b"not a tar" * 100, code=2)
    assert "the input is no tar" in result.err
    dlcmd.program("put", "--tar", "-", "pets", code=2)


def test_archives_are_put_by_path_glob_and_folder(dlcmd: Dlcmd, tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.tar").write_bytes(tar_of((name, name.encode())))
    dlcmd("put", "--unpack", folder / "a.tar", f"{folder}/[b]*", "pets/deep")
    assert dlcmd("ls", "pets/deep").out == b"a\nb\n"
    assert b"skipped 2 of 3 archives" in dlcmd("put", "--unpack", folder, "pets/deep").out
    assert dlcmd("cat", "pets/deep/c").out == b"c"
    assert dlcmd("put", "-n", "--unpack", folder, "other").out.startswith(b"would put 3 entries")


@each_row(
    ("arguments", "code", "message"),
    [
        (["pets"], 2, "takes SRC... and DATASET"),
        (["--tar", "-", "a.tar", "pets"], 2, "cannot be used with --tar"),
        (["--files-from", "-", "a.tar", "pets"], 2, "cannot be used with --tar"),
        (["nothing.tar", "pets"], 10, "no file nothing.tar"),
        (["nothing*.tar", "pets"], 10, "no file matches nothing*.tar"),
        (["ftp://host/a.tar", "pets"], 2, "no archive can lie at ftp://"),
        (["http://h/a.tar", "http://h/a.tar", "pets"], 2, "is named twice"),
        (["https://me:secret@host/a.tar", "pets"], 2, "holds no password"),
        (["http://127.0.0.1:1/a.tar#sha256=1", "pets"], 2, "64 hex digits"),
    ],
)
def test_bad_archives_are_named(
    dlcmd: Dlcmd, arguments: list[str], code: int, message: str
) -> None:
    result = dlcmd("put", "--unpack", *arguments, code=code)
    assert message in result.err
    assert "secret" not in result.err
    assert not dlcmd.store.exists()


def test_A15_a_signal_ends_a_put_which_can_be_repeated(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """The dataset may have the name of a verb that has nothing to finish."""
    whole = tar_of(("a", b"1"), ("b", b"2" * 100_000))
    os.mkfifo(tmp_path / "pipe")
    with (
        dlcmd.start("put", "--tar", tmp_path / "pipe", "top") as process,
        (tmp_path / "pipe").open("wb", buffering=0) as pipe,  # blocks until a reader opens it
    ):
        pipe.write(whole[:1024])
        wait_for_reader(pipe.fileno(), process.pid)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    result = "dlcmd: ended by SIGTERM; 0 files (0 B) committed so far; run it again to finish\n"
    assert (process.returncode, err.decode()) == (143, result)
    (tmp_path / "a.tar").write_bytes(whole)
    dlcmd("put", "--tar", tmp_path / "a.tar", "top")
    assert dlcmd("ls", "top").out == b"a\nb\n"
    dlcmd("verify", "top")


def test_A15_a_listing_ends_silently_with_its_reader(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    receiver, sender = os.pipe()
    os.close(receiver)
    try:
        for words in (["ls", "pets"], ["--help"], ["--version"]):
            with dlcmd.start(*words, stdout=sender) as process:
                _, err = process.communicate(timeout=60)
            assert (words, process.returncode, err) == (words, 141, b"")
    finally:
        os.close(sender)


def drawn_by(*words: str | Path) -> bytes:
    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    drawn = b""
    with subprocess.Popen(
        [sys.executable, "-m", "dlcmd", *words],
        stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(theirs)
        with suppress(OSError):  # the terminal's other side has closed
            while piece := os.read(terminal, 4096):
                drawn += piece
    os.close(terminal)
    assert process.returncode == 0
    return drawn


def test_the_bar_on_a_terminal_names_the_units_of_a_verb(dlcmd: Dlcmd, tmp_path: Path) -> None:
    drawn = drawn_by("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    assert b"put pets" in drawn
    assert b"entries" in drawn
    assert b"B/s" in drawn
    for verb in ("verify", "recover"):
        drawn = drawn_by(verb, "pets")
        assert f"{verb} pets".encode() in drawn
        assert b"chunks, " in drawn
        assert b"entries, " not in drawn
        assert b"B/s" not in drawn


def test_progress_in_json_names_the_units_of_a_verb() -> None:
    described = progress_json("chunks", 10.0, 20, 80, None)
    assert described == {
        "event": "progress", "chunks": 20, "chunks_total": 80, "chunks_per_s": 2.0,
        "seconds": 10.0, "seconds_left": 30.0,
    }  # fmt: skip
    beyond = progress_json("entries", 10.0, 17, 2, 0)
    assert beyond["seconds_left"] == 0, "bytes beyond the total"
