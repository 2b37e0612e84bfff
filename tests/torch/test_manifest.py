"""The samples of a manifest: with a mount and without one they are those of the table."""

import csv
import io
import os
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from diesel_fs.errors import NoSuchPath, UsageError
from diesel_fs.torch import ChunkShuffleSampler, DieselDataset, ManifestFolder
from dlcmd.main import run
from tests.cli.conftest import Dlcmd
from tests.cli.conftest import dlcmd as dlcmd
from tests.examples import examples
from tests.trees import write

TABLE = [(f"d{n % 7}/{n:03}.bin", f"{n % 3}") for n in range(90)]
FILES = {path: path.encode() * 900 for path, _ in TABLE}
ROWS = [(FILES[path], int(target)) for path, target in TABLE]


def table_of(rows: list[tuple[str, str]], target: str = "target") -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("path", target), *rows])
    return out.getvalue().encode("utf-8", "surrogateescape")


def put(top: Path, files: dict[str, bytes], manifest: bytes, address: str = "pets") -> str:
    (top / "table").write_bytes(manifest)
    url = (top / "store").as_uri()
    source = str(write(top / "src", files))
    words = ["put", "--chunk-size", "64K", source, address, "--manifest", str(top / "table")]
    assert run(["-q", "--url", url, *words]) == 0
    return url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return put(tmp_path_factory.mktemp("pets"), FILES, table_of(TABLE))


@pytest.fixture
def pets(url: str) -> Iterator[DieselDataset]:
    with DieselDataset("pets", loader=bytes, manifest=True, url=url) as dataset:
        yield dataset


def check_rows(data: DieselDataset | ManifestFolder) -> None:
    """The rows of `TABLE`, as users of torchvision expect them."""
    assert len(data) == len(TABLE)
    assert data.classes == ["0", "1", "2"]
    assert data.class_to_idx == {"0": 0, "1": 1, "2": 2}
    assert data.targets == [int(target) for _, target in TABLE]
    assert data[4] == data[4 - len(TABLE)] == (FILES[TABLE[4][0]], 1)
    with pytest.raises(IndexError):
        data[len(TABLE)]


def test_samples_are_those_of_the_manifest_in_its_order(pets: DieselDataset, url: str) -> None:
    """`target_loader` converts the text of a target."""
    check_rows(pets)
    assert pets.samples == pets.imgs == [(path, int(target)) for path, target in TABLE]
    assert pets.__getitems__([3, 1, -1]) == [ROWS[at] for at in (3, 1, -1)]
    assert "90" in repr(pets)
    sent = bytes(ForkingPickler.dumps(pets))
    assert len(sent) < 30 * len(TABLE)
    with ForkingPickler.loads(sent) as loaded:
        check_rows(loaded)
    with DieselDataset(
        "pets", len, lambda target: -target, bytes, manifest=True, target_loader=float, url=url
    ) as data:
        assert data[5] == (9000, -2.0)
        assert data.__getitems__([5, 4]) == [(9000, -2.0), (9000, -1.0)]
        assert data.targets[5] == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_them_in_chunk_wise_order(pets: DieselDataset, workers: int) -> None:
    sampler = ChunkShuffleSampler(pets, seed=3, group_size=2)
    expected = [ROWS[at] for at in sampler]
    assert expected != ROWS
    loader = DataLoader(pets, batch_size=7, sampler=sampler, num_workers=workers, collate_fn=list)
    assert [row for batch in loader for row in batch] == expected
    assert sorted(expected) == sorted(ROWS)


def test_targets_may_be_files(tmp_path: Path) -> None:
    """Datasets of sounds have separate files of words."""
    rows = [(f"sound/{n}", f"words/{n % 5}") for n in range(20)]
    files = {path: path.encode() * 1500 for row in rows for path in row}
    url = put(tmp_path, files, table_of(rows, "target_path"), "pets/train")
    with DieselDataset("pets/train", loader=bytes, manifest=True, url=url) as data:
        assert data[7] == (files["sound/7"], files["words/2"])
        sampler = ChunkShuffleSampler(data, group_size=1)
        loader = DataLoader(data, batch_size=3, sampler=sampler, collate_fn=list)
        assert data.__getitems__([]) == []
        given = sorted(row for batch in loader for row in batch)
        assert given == sorted((files[path], files[target]) for path, target in rows)
        assert data.classes == sorted({target for _, target in rows})
    with DieselDataset("pets/train", manifest=True, loader=len, target_loader=len, url=url) as data:
        assert data.__getitems__([0, 9]) == [(7 * 1500, 7 * 1500), (7 * 1500, 7 * 1500)]
    write(tmp_path / "out", files)
    (tmp_path / "out" / "table.csv").write_bytes(table_of(rows, "target_path"))
    folder = ManifestFolder(tmp_path / "out", loader=os.path.basename, manifest="table.csv")
    assert folder[7] == ("7", files["words/2"])
    folder.target_loader = os.path.basename
    assert folder[8] == ("8", "3")


def test_another_manifest_may_be_named_and_bad_ones_are_refused(tmp_path: Path) -> None:
    files = {"a/1.png": b"1", "lists/val.tsv": b"path\ttarget\nx\tcat, black\n", "lists/x": b"2"}
    url = put(tmp_path, files, b"path,target\na/1.png,x\nlists/x,y\n")
    with DieselDataset("pets", loader=bytes, manifest="lists/val.tsv", url=url) as data:
        assert (data[0], data.classes) == ((b"2", 0), ["cat, black"])
    with DieselDataset("pets/lists", loader=bytes, manifest="val.tsv", url=url) as data:
        assert data.samples == [("lists/x", 0)]
    with pytest.raises(NoSuchPath, match="absent"):
        DieselDataset("pets", loader=bytes, manifest="absent", url=url)
    with pytest.raises(UsageError, match="so nothing else can choose"):
        DieselDataset("pets", manifest=True, extensions=".png", url=url)
    with pytest.raises(UsageError, match="needs a manifest"):
        DieselDataset("pets", target_loader=int, url=url)
    with pytest.raises(NoSuchPath, match=r"no manifest pets/a/\.manifest\.csv"):
        DieselDataset("pets/a", manifest=True, url=url)
    with pytest.raises(NoSuchPath, match="no manifest"):
        ManifestFolder(tmp_path / "src")
    (tmp_path / "src" / ".manifest.csv").write_bytes(b"path,target\n../table,x\n")
    with pytest.raises(UsageError, match=r"line 2: bad path \.\./table"):
        ManifestFolder(tmp_path / "src")
    assert run(["-q", "--url", url, "rm", "pets/lists/x"]) == 0
    with pytest.raises(NoSuchPath, match=r"line 3: lists/x: the dataset has no such file"):
        DieselDataset("pets", manifest=True, url=url)


def content(path: str) -> bytes:
    return Path(path).read_bytes()


NAMES = st.text(st.sampled_from('aB-, "\n\ré\U0001f600\udc80'), min_size=1, max_size=3)
TARGETS = st.text(st.sampled_from('ab,"\n 019é'), min_size=1, max_size=3)


@examples(10)
@given(
    rows=st.dictionaries(
        st.tuples(st.sampled_from(["", "d/", "d/é/"]), NAMES).map("".join), TARGETS,
        min_size=1, max_size=8,
    ),
    below=st.sampled_from(["", "/train"]),
)  # fmt: skip
def test_the_samples_of_any_table_are_read(
    rows: dict[str, str], below: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    top = tmp_path_factory.mktemp("table")
    files = {f"f/{path}x": os.fsencode(path) for path in rows}
    table = table_of([(f"f/{path}x", target) for path, target in rows.items()])
    url = put(top, files, table, f"pets{below}")
    expected = [(os.fsencode(path), target) for path, target in rows.items()]
    with DieselDataset(
        f"pets{below}", loader=bytes, manifest=True, target_loader=str, url=url
    ) as data:
        assert [data[at] for at in range(len(data))] == expected
        assert data.__getitems__([*range(len(data))]) == expected
        assert [data.classes[at] for at in data.targets] == [target for _, target in expected]
    assert run(["-q", "--url", url, "get", f"pets{below}", str(top / "out")]) == 0
    folder = ManifestFolder(top / "out", loader=content, target_loader=str)
    assert [folder[at] for at in range(len(folder))] == expected


SCRIPT = """
import sys
from torch.utils.data import DataLoader
from diesel_fs.torch import ManifestFolder
data = ManifestFolder(sys.argv[1], len)
data.loader = lambda path: open(path, "rb").read()
assert sum(len(batch) for batch in DataLoader(data, 9, shuffle=True, collate_fn=list)) == 90
"""


@pytest.mark.fuse
def test_a_mount_has_the_samples_and_their_pictures(dlcmd: Dlcmd, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), 5).save(file, "png")
    pictures = {path.replace(".bin", ".png"): file.getvalue() for path, _ in TABLE}
    rows = [(path.replace(".bin", ".png"), target) for path, target in TABLE]
    (tmp_path / "table").write_bytes(table_of(rows))
    source = write(tmp_path / "src", pictures)
    dlcmd("put", source, "pets/train", "--manifest", tmp_path / "table")
    at = tmp_path / "mnt"
    dlcmd("mount", "pets", at)
    try:
        data = ManifestFolder(at / "train", transform=lambda image: image.size)
        assert data.samples == [(f"{at}/train/{path}", int(target)) for path, target in rows]
        assert (data.classes, data[4]) == (["0", "1", "2"], ((3, 2), 1))
        sampler = ChunkShuffleSampler(data, seed=1)
        loader = DataLoader(data, batch_size=9, sampler=sampler, collate_fn=list)
        given = [row for batch in loader for row in batch]
        assert given == [((3, 2), data.targets[at]) for at in sampler]
        plain = ManifestFolder(at / "train", loader=content, target_loader=int)
        assert plain[8] == (file.getvalue(), 2)
        assert "90" in repr(plain)
        errors = dlcmd.program("run", "--", sys.executable, "-c", SCRIPT, at / "train").err
        assert "announced 1 of 1 epochs" in errors
    finally:
        dlcmd("umount", "--force", at)
