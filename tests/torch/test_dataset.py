"""`DieselDataset` has the samples of torchvision's `ImageFolder` on the same files."""

import copy
import io
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

import deploy.torchvision_operators  # noqa: F401  (torchvision may not import without it)
import diesel_fs
import diesel_fs.torch
from diesel_fs.errors import NoSuchPath, NotFoundError, UsageError
from diesel_fs.torch import ChunkShuffleSampler, DieselDataset
from diesel_fs.torch.folder import resolved
from tests.cli.conftest import program_environment
from tests.examples import examples
from tests.rows import each_row
from tests.trees import write

from .stores import packed

from torchvision.datasets import DatasetFolder, ImageFolder  # isort: skip  (behind what makes it importable)


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("P" if number % 2 else "RGB", (3, 2), number).save(file, "png")
    return file.getvalue()


ODD = [
    "cat/1.png", "cat/2.JPG", "cat/b/x.png", "cat/b-1/x.png", "cat/b/c/y.PNG", "cat/notes.txt",
    "cat/é.png", "cat/\udcff.png", "cat/\uffff.png", "cat/.png", "cat/a b\n.png", "cat/png",
    "Dog/1.webp", "Dog/deep/er/1.tiff", "Dog/1.png.bak", "Dog/İ.png", "ape\udc80/1.png",
    "ape/1.ppm", "ape.x/1.bmp", "stray.png",
]  # fmt: skip


def odd_folder(top: Path) -> Path:
    write(top, {name: picture(number) for number, name in enumerate(ODD)})
    (top / "cat" / "link.png").symlink_to("1.png")
    (top / "cat" / "up.png").symlink_to("../Dog/1.webp")
    (top / "cat" / "nowhere.png").symlink_to("absent.png")
    (top / "cat" / "outside.png").symlink_to("/nonexistent/x.png")
    (top / "cat" / "linked").symlink_to("../Dog/deep")
    (top / "wolf").symlink_to("Dog")
    (top / "notes").symlink_to("stray.png")
    return top


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_folder(tmp_path_factory.mktemp("folder") / "src")


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return packed(folder, folder.parent / "store")


@pytest.fixture
def pets(url: str) -> Iterator[DieselDataset]:
    with DieselDataset("pets", url=url) as dataset:
        yield dataset


def relative(dataset: DatasetFolder) -> list[tuple[str, int]]:
    """The samples of a folder on disk, with the paths that a dataset has for them."""
    return [(os.path.relpath(path, dataset.root), target) for path, target in dataset.samples]


def test_samples_are_those_of_image_folder(folder: Path, pets: DieselDataset) -> None:
    expected = ImageFolder(folder)
    samples = relative(expected)
    assert pets.classes == expected.classes
    assert pets.class_to_idx == expected.class_to_idx
    assert list(pets.samples) == pets.samples == pets.imgs == samples
    assert pets.targets == expected.targets
    assert pets.samples[-1] == samples[-1]
    assert pets.samples[1:9:3] == samples[1:9:3]
    assert pets.targets[2:5] == expected.targets[2:5]
    assert len(pets) == len(expected)
    with pytest.raises(IndexError):
        pets.samples[len(pets)]


def test_images_are_those_of_image_folder(folder: Path, url: str) -> None:
    def brighter(image: Image.Image) -> list[float]:
        return [each * torch.rand(1).item() for each in image.tobytes()]

    ours = DieselDataset("pets", brighter, lambda target: -target, url=url)
    theirs = ImageFolder(folder, brighter, lambda target: -target)
    good = [at for at, (path, _) in enumerate(ours.samples) if (folder / path).exists()]
    assert len(good) == len(ours) - 2
    with ours:
        torch.manual_seed(2)
        expected = [theirs[at] for at in good]
        torch.manual_seed(2)
        assert [ours[at] for at in good] == expected
        torch.manual_seed(2)
        assert ours.__getitems__(good) == expected
        assert ours.__getitems__([]) == []
        bad = next(at for at in range(len(ours)) if at not in good)
        with pytest.raises(FileNotFoundError):
            ours[bad]
        with pytest.raises(FileNotFoundError):
            ours.__getitems__([good[0], bad])
        for wrong in (len(ours), -len(ours) - 1):
            with pytest.raises(IndexError):
                ours[wrong]
        assert ours[good[0] - len(ours)][1] == expected[0][1]
    with pytest.raises(UsageError, match="closed"):
        ours[good[0]]


def test_a_folder_of_the_dataset_and_other_files(folder: Path, url: str) -> None:
    named = (".tiff", ".png")
    expected = DatasetFolder(folder / "cat", len, extensions=named)
    with DieselDataset("pets/cat", loader=bytes, extensions=named, url=url) as dataset:
        assert dataset.classes == expected.classes == ["b", "b-1", "linked"]
        assert dataset.samples == [(f"cat/{path}", at) for path, at in relative(expected)]
        assert dataset[0] == ((folder / dataset.samples[0][0]).read_bytes(), 0)

    def chosen(path: str) -> bool:
        return path.endswith("1.png")

    expected = ImageFolder(folder, is_valid_file=chosen, allow_empty=True)
    with DieselDataset("pets/", is_valid_file=chosen, allow_empty=True, url=url) as dataset:
        assert dataset.samples == relative(expected)


@each_row("names", [["a/1.png", "b/1.txt", "c/1.txt"], ["1.png"]])
def test_errors_are_those_of_image_folder(names: list[str], tmp_path: Path) -> None:
    """A class without images, or no class."""
    source = write(tmp_path / "src", dict.fromkeys(names, b"x"))
    if has_classes := len(names) > 1:
        (source / "empty").mkdir()
    url = packed(source, tmp_path / "store")
    with pytest.raises(FileNotFoundError) as expected:
        ImageFolder(source)
    with pytest.raises(NoSuchPath) as found:
        DieselDataset("pets", url=url)
    assert found.value.message == str(expected.value).replace(str(source), "pets")
    if has_classes:
        with DieselDataset("pets", loader=bytes, allow_empty=True, url=url) as dataset:
            assert dataset.classes == ["a", "b", "c", "empty"]
            assert dataset.samples == relative(ImageFolder(source, allow_empty=True))


def test_bad_arguments_and_links_in_a_circle_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(NoSuchPath, match="absent"):
        DieselDataset("pets/absent", url=url)
    with pytest.raises(UsageError, match="is not a folder"):
        DieselDataset("pets/stray.png", url=url)
    with pytest.raises(NotFoundError):
        DieselDataset("nobody", url=url)
    with pytest.raises(UsageError, match="bad version"):
        DieselDataset("pets@now", url=url)
    with pytest.raises(UsageError, match="either"):
        DieselDataset("pets", url=url, is_valid_file=bool, extensions=".png")
    source = write(tmp_path / "src", {"a/b/1.png": b"x"})
    (source / "a" / "b" / "loop").symlink_to("../../a")
    (source / "self").symlink_to("self")
    circle = packed(source, tmp_path / "store")
    with pytest.raises(UsageError, match="leads to a folder that it lies in"):
        DieselDataset("pets", url=circle)
    with diesel_fs.connect("pets", circle) as dataset:
        assert resolved(dataset.snapshot, dataset.snapshot.index_of(b"self")) == -1


NAMES = st.text(st.sampled_from("aB-./é\U0001f600\udc80"), min_size=1, max_size=3).filter(
    lambda name: "/" not in name and name not in (".", "..")
)
TREES = st.lists(
    st.tuples(NAMES, st.lists(NAMES, max_size=2), st.sampled_from(["1.png", "2.PNG", "é.png"])),
    min_size=1,
    max_size=8,
)


@examples(8)
@given(tree=TREES)
def test_any_tree_has_the_samples_of_image_folder(
    tree: list[tuple[str, list[str], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    top = tmp_path_factory.mktemp("tree")
    for class_name, inner, name in tree:
        (top / "src" / class_name).joinpath(*inner).mkdir(parents=True, exist_ok=True)
        (top / "src" / class_name).joinpath(*inner, name).write_bytes(b"x")
    url = packed(top / "src", top / "store")
    expected = ImageFolder(top / "src")
    with DieselDataset("pets", url=url) as dataset:
        assert dataset.classes == expected.classes
        assert dataset.samples == relative(expected)
        assert dataset.targets == expected.targets


def binary(url: str, name: str = "pets", memory_bytes: int | None = None) -> DieselDataset:
    return DieselDataset(name, loader=bytes, extensions=".bin", url=url, memory_bytes=memory_bytes)


def test_the_version_stays_and_an_older_one_can_be_named(tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"a/1.bin": b"one", "b/1.bin": b"two"})
    url = packed(source, tmp_path / "store")
    with binary(url) as dataset:
        write(source, {"a/1.bin": b"three", "a/0.bin": b"zero"})
        packed(source, tmp_path / "store")
        assert [dataset[at][0] for at in range(len(dataset))] == [b"one", b"two"]
        [again, other] = copy.deepcopy(dataset).__getitems__([0, 1])
        assert (again[0], other[0]) == (b"one", b"two")
        name = f"pets@{dataset.version}"
        with binary(url) as newer:
            assert [newer[at][0] for at in range(3)] == [b"zero", b"three", b"two"]
    with binary(url, f"{name}/") as older:
        assert [older[at][0] for at in range(2)] == [b"one", b"two"]


def test_a_pickle_is_small_and_holds_no_list_of_names(tmp_path: Path) -> None:
    files = {f"c{n % 9}/{n:06}-{'name' * 9}.bin": b"" for n in range(3000)}
    url = packed(write(tmp_path / "src", files), tmp_path / "store")
    with binary(url) as dataset:
        sent = bytes(ForkingPickler.dumps(dataset))
        assert len(sent) < 8 * len(files)
        with ForkingPickler.loads(sent) as loaded:
            assert loaded.samples == dataset.samples
            assert loaded.version == dataset.version
        assert "3000" in repr(dataset)
        assert "(3000 rows)" in repr(dataset.samples)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_the_same(start: str, tmp_path: Path) -> None:
    chance = random.Random(3)
    files = {f"c{n % 3}/{n:03}.bin": chance.randbytes(9000) for n in range(60)}
    url = packed(write(tmp_path / "src", files), tmp_path / "store")
    with binary(url, memory_bytes=600_000) as dataset:
        sampler = ChunkShuffleSampler(dataset, group_size=2)
        expected = [files[dataset.samples[at][0]] for at in sampler]
        assert len(list(dataset.__getitems__(list(sampler)[:20]))) == 20  # it follows the order
        workers = 2 if start == "fork" else 1  # a spawned one takes seconds to start
        several = DataLoader(  # its workers do not
            dataset, batch_size=7, sampler=sampler, collate_fn=list, num_workers=workers,
            multiprocessing_context=start,
        )  # fmt: skip
        assert [each[0] for batch in several for each in batch] == expected


def test_in_chunk_wise_order_each_chunk_is_read_once(tmp_path: Path) -> None:
    """One process reads each chunk whole, with the memory of two groups."""
    chance = random.Random(3)
    files = {f"c/{n:03}.bin": chance.randbytes(9000) for n in range(90)}
    url = packed(write(tmp_path / "src", files), tmp_path / "store")
    with binary(url, memory_bytes=300_000) as dataset:
        chunks = dataset.snapshot.chunk_count
        assert chunks > 8
        sampler = ChunkShuffleSampler(dataset, group_size=2)
        expected = [files[dataset.samples[at][0]] for at in sampler]
        loader = DataLoader(dataset, batch_size=7, sampler=sampler, collate_fn=list)
        assert [each[0] for batch in loader for each in batch] == expected
        assert dataset._dataset._reader.stats()["chunk_fetches"] == chunks


IMPORTS = """
import sys
import diesel_fs.torch
assert "torch" not in sys.modules and callable(diesel_fs.torch.join)
assert {"DieselDataset", "join"} <= set(dir(diesel_fs.torch))
sys.modules["torch"] = None  # as where it is not installed
try:
    from diesel_fs.torch import DieselDataset
except ImportError as error:
    print(error)
"""


def test_without_torch_the_package_can_be_imported() -> None:
    message = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=program_environment(), text=True, check=True,
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    assert message == "diesel_fs.torch.DieselDataset needs PyTorch: install torch\n"
    with pytest.raises(AttributeError, match="no attribute"):
        _ = diesel_fs.torch.Absent


def test_without_pil_the_error_names_the_remedy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="loader=bytes"):
        DieselDataset("pets", url=url)
    with DieselDataset("pets", loader=bytes, url=url) as dataset:
        assert isinstance(dataset[0][0], bytes)


@each_row(
    ("root", "options", "message"),
    [
        ("pets", {"transfrom": str}, "is transform meant"),
        ("pets", {"memory": 1 << 20}, "is memory_bytes meant"),
        ("pets", {"create": True}, "unknown word 'create'"),
        ("/pets/train", {}, "write DATASET or DATASET/FOLDER"),
        (None, {}, "root is text, not of type NoneType"),
        (b"pets", {}, "root is text, not of type bytes"),
    ],
)
def test_D1_a_bad_argument_is_named(
    url: str, root: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        DieselDataset(root, url=url, **options)  # type: ignore[arg-type]  # on purpose
