"""Many clients of a task in one process: it opens a dataset many times, and reads orders as lines
of JSON.

The first line is `{"clients": N, "connect": {...}}` with the arguments of `connect`; the answer is
the number of chunks. Then:

    {"do": "read"}      each client reads a file of each chunk; how many files were right, and how
                        many had to come from the store
"""

import json
import sys
from contextlib import ExitStack

import numpy as np

from diesel_fs import Dataset, connect
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly


def read(clients: list[Dataset]) -> dict[str, int]:
    """Read a file of each chunk with each client."""
    first = clients[0]
    files = first.snapshot.files()
    wanted = files[np.unique(first.snapshot.chunk_of(files), return_index=True)[1]]
    expected = first.stat_many(wanted).size.tolist()
    right, from_store = 0, 0
    for client in clients:
        sizes = map(len, client.read_many(wanted))
        right += sum(size == known for size, known in zip(sizes, expected, strict=True))
        counts = client.task_stats()["client"]
        assert isinstance(counts, dict)
        from_store += counts["store_reads"]
    return {"right": right, "from_store": from_store, "files": len(clients) * len(wanted)}


def main() -> None:
    """Connect, and run the orders."""
    open_buckets_directly()  # it never forks
    words = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        clients = [
            stack.enter_context(connect(**words["connect"])) for _ in range(words["clients"])
        ]
        print(json.dumps({"chunks": clients[0].snapshot.chunk_count}), flush=True)
        for line in sys.stdin:
            assert json.loads(line) == {"do": "read"}
            print(json.dumps(read(clients)), flush=True)


if __name__ == "__main__":
    main()
