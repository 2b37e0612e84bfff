"""The suites of other repositories, over a server with a real Redis: no test notices the
difference.

The tests are those of `tests/ingest`, `tests/client` and `tests/repository` that use a
repository from outside; only the way to open it is different here.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.interface import Repository
from tests.client.test_client import (  # noqa: F401
    dataset,
    filled,
    new,
    test_a_file_and_a_folder_of_two_writers_are_both_kept,
    test_a_forked_child_never_flushes_the_puts_of_its_parent,
    test_a_reader_keeps_its_version_until_a_path_is_missing,
    test_an_epoch_in_chunk_wise_order_loads_each_chunk_once,
    test_an_exception_flushes_nothing,
    test_mount_from_python,
    test_put_get_delete,
    test_put_refuses_a_conflict_with_another_writers_entry,
    test_put_refuses_a_path_below_a_file,
    test_save_and_load_meta,
    test_shuffle_of_a_part_and_a_folder,
    test_views_outlive_the_dataset,
    test_Z9_a_forked_child_follows_the_order_too,
    test_Z9_parent_and_child_both_read,
)
from tests.ingest.test_put import (  # noqa: F401
    test_a_tree_of_all_oddities,
    test_empty_folders_go_in_many_messages,
    test_large_files_in_extents,
    test_put_again_takes_only_changed_files,
)
from tests.ingest.test_source_contract import (  # noqa: F401
    folder_source,
    many,
    put_many,
    put_one,
    test_a_dry_run_counts_and_changes_nothing,
    test_content_mode_and_mtime,
    test_delete_removes_missing_entries,
    test_empty_sources_make_empty_datasets,
)
from tests.repository.test_interleavings import (  # noqa: F401
    test_Z4_file_in_two_writers_and_a_folder_of_its_name,
    test_Z5_an_open_chunk_and_anothers_acknowledged_put,
)
from tests.repository.test_readers import (  # noqa: F401
    test_M9_dataset_names,
)

from ..trees import write
from .server_with_redis import ServerWithRedis, as_user, server_with_redis

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWithRedis]:
    with server_with_redis(tmp_path_factory.mktemp("behind")) as found:
        found.add()
        yield found


@pytest.fixture
def repository(servers: ServerWithRedis) -> Iterator[Repository]:
    servers.empty()
    with servers.open() as opened:
        yield opened


@pytest.fixture
def url(servers: ServerWithRedis) -> Iterator[str]:
    servers.empty()
    with as_user(servers):
        yield servers.url


@pytest.fixture
def large(url: str, servers: ServerWithRedis, tmp_path: Path) -> str:
    files = {f"{'val' if n % 10 else 'train'}/{n:04}": os.urandom(4000) for n in range(1020)}
    source = write(tmp_path / "large", files | {f"train/empty{n}": b"" for n in range(9)})
    with servers.open() as repository:
        options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress="none", jobs=1)
        put(repository, "large", FolderSource(source), options=options)
    return url
