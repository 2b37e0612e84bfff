"""pandas, pyarrow, Hugging Face `datasets` and zarr read by `diesel://`, for the test beside it."""

import io
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import zarr
from PIL import Image

from diesel_fs.ingest import FolderSource, put
from diesel_fs.repository.local import LocalRepository

ROWS = pd.DataFrame({"name": [f"row {i}" for i in range(5000)], "value": range(5000)})
NUMBERS = np.arange(60_000, dtype=np.float32).reshape(200, 300)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A repository with one dataset that has tables, arrays and a folder of images."""
    top = tmp_path_factory.mktemp("clients")
    source = top / "src"
    (source / "tables").mkdir(parents=True)
    ROWS.to_csv(source / "rows.csv", index=False)
    ROWS.to_csv(source / "rows.csv.gz", index=False)
    for part in range(4):
        rows = ROWS[part * 1250 : (part + 1) * 1250]
        rows.to_parquet(source / "tables" / f"{part}.parquet", index=False, row_group_size=500)
    for number in (2, 3):
        array = zarr.create_array(
            source / f"v{number}.zarr", shape=NUMBERS.shape, dtype=NUMBERS.dtype, chunks=(40, 70),
            zarr_format=number,
        )  # fmt: skip
        array[:] = NUMBERS
    group = zarr.open_group(source / "group.zarr", mode="w")
    sharded = group.create_array(
        "sharded", shape=NUMBERS.shape, dtype=NUMBERS.dtype, chunks=(20, 30), shards=(100, 150)
    )
    sharded[:] = NUMBERS
    for kind, brightness in (("cat", 60), ("dog", 200)):
        (source / "images" / kind).mkdir(parents=True)
        for i in range(6):
            Image.new("L", (8, 8), brightness + i).save(source / "images" / kind / f"{i}.png")
    found = (top / "store").as_uri()
    with LocalRepository.open(found, create=True) as repository:
        put(repository, "pets", FolderSource(source))
    return found


def test_pandas(url: str) -> None:
    options = {"repository": url}
    for name in ("rows.csv", "rows.csv.gz"):
        found = pd.read_csv(f"diesel://pets/{name}", storage_options=options)
        pd.testing.assert_frame_equal(found, ROWS)
    one = pd.read_parquet("diesel://pets/tables/1.parquet", storage_options=options)
    pd.testing.assert_frame_equal(one, ROWS[1250:2500].reset_index(drop=True))
    every = pd.read_parquet("diesel://pets/tables", storage_options=options)
    pd.testing.assert_frame_equal(every, ROWS)
    with pytest.raises(FileNotFoundError):
        pd.read_csv("diesel://pets/none.csv", storage_options=options)
    with pytest.raises(OSError, match="read-only"):
        ROWS.to_csv("diesel://pets/new.csv", storage_options=options)


def test_pyarrow(url: str) -> None:
    fs = fsspec.filesystem("diesel", repository=url)
    table = pyarrow.dataset.dataset("pets/tables", filesystem=fs, format="parquet")
    assert table.count_rows() == len(ROWS)
    found = table.to_table(filter=pyarrow.dataset.field("value") >= 4990)
    assert found["name"].to_pylist() == [f"row {i}" for i in range(4990, 5000)]
    one = pyarrow.parquet.read_table("pets/tables/2.parquet", filesystem=fs, columns=["value"])
    assert one["value"].to_pylist() == [*range(2500, 3750)]
    arrow = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fs))
    info = arrow.get_file_info("pets/rows.csv")
    assert (info.type, info.size) == (pa.fs.FileType.File, fs.info("pets/rows.csv")["size"])
    selector = pa.fs.FileSelector("pets/images", recursive=True)
    assert sum(each.is_file for each in arrow.get_file_info(selector)) == 12


@pytest.mark.parametrize("streaming", [False, True], ids=["cached", "streamed"])
def test_hugging_face_datasets(
    url: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"repository": url}
    found = datasets.load_dataset(
        "csv", data_files="diesel://pets/rows.csv", split="train", streaming=streaming,
        storage_options=options, cache_dir=str(tmp_path),
    )  # fmt: skip
    assert [row["value"] for row in found] == [*range(5000)]
    packed = datasets.load_dataset(
        "csv", data_files="diesel://pets/rows.csv.gz", split="train", streaming=streaming,
        storage_options=options, cache_dir=str(tmp_path),
    )  # fmt: skip
    assert [row["value"] for row in packed] == [*range(5000)]
    tables = datasets.load_dataset(
        "parquet", data_files={"test": "diesel://pets/tables/*.parquet"}, split="test",
        streaming=streaming, storage_options=options, cache_dir=str(tmp_path),
    )  # fmt: skip
    assert [row["name"] for row in tables] == [*ROWS["name"]]
    monkeypatch.setenv("DIESEL_URL", url)  # then only URLs are needed
    images = datasets.load_dataset(
        "imagefolder", data_files="diesel://pets/images/**", split="train", streaming=streaming,
        cache_dir=str(tmp_path),
    )  # fmt: skip
    pixels = {(row["label"], row["image"].convert("L").getpixel((0, 0))) for row in images}
    assert pixels == {(label, 60 + 140 * label + i) for label in (0, 1) for i in range(6)}


def test_datasets_read_by_forked_workers(url: str, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict(
        {"path": [f"diesel://pets/images/cat/{i}.png" for i in range(6)]}
    )

    def brightness(row: dict[str, str]) -> dict[str, object]:
        with fsspec.open(row["path"], repository=url) as file:
            return {"brightness": Image.open(io.BytesIO(file.read())).getpixel((0, 0))}

    found = rows.map(brightness, num_proc=2, cache_file_name=str(tmp_path / "cache.arrow"))
    assert found["brightness"][:] == [60, 61, 62, 63, 64, 65]


@pytest.mark.parametrize("name", ["v2.zarr", "v3.zarr", "group.zarr/sharded"])
def test_zarr(url: str, name: str) -> None:
    array = zarr.open_array(f"diesel://pets/{name}", mode="r", storage_options={"repository": url})
    np.testing.assert_array_equal(array[:], NUMBERS)
    np.testing.assert_array_equal(array[13:57, 100:290], NUMBERS[13:57, 100:290])


def test_a_zarr_group(url: str) -> None:
    options = {"storage_options": {"repository": url}}
    group = zarr.open_group("diesel://pets/group.zarr", mode="r", **options)
    assert [*group.array_keys()] == ["sharded"]
    with pytest.raises(OSError, match="read-only"):
        zarr.open_array("diesel://pets/new.zarr", mode="w", shape=(4,), dtype="i4", **options)
