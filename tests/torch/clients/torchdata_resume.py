"""Stops and resumes torchdata's `StatefulDataLoader` with a `ChunkShuffleSampler` at each batch.

`torchdata_resume.py URL WORKERS` runs in the environment `.venv/clients`, which has torchdata and
diesel_fs. It prints `ok`, or fails.
"""

import json
import sys
from collections.abc import Iterable

from torchdata.stateful_dataloader import StatefulDataLoader

from diesel_fs.torch import ChunkShuffleSampler, DieselDataset

BATCH = 4


def contents(rows: list[tuple[object, int]]) -> list[int]:
    return [content[0] for content, _ in rows if isinstance(content, bytes)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [each for batch in batches for each in batch]


def main() -> None:
    url, workers = sys.argv[1:]
    dataset = DieselDataset("pets", loader=bytes, extensions=".bin", url=url)

    def loader(rank: int = 0, world: int = 1) -> StatefulDataLoader:
        sampler = ChunkShuffleSampler(dataset, rank=rank, world=world, group_size=2)
        sampler.set_epoch(3)
        return StatefulDataLoader(
            dataset, batch_size=BATCH, sampler=sampler, num_workers=int(workers),
            collate_fn=contents, multiprocessing_context="fork" if int(workers) else None,
        )  # fmt: skip

    expected = list(loader())
    assert sorted(flat(expected)) == list(range(len(dataset)))
    for stop in range(1, len(expected) + 1):
        first, found = loader(), []
        for batch in first:
            found.append(batch)
            if len(found) == stop:
                break
        state = json.loads(json.dumps(first.state_dict()))
        second = loader()
        second.load_state_dict(state)
        assert found + list(second) == expected, stop
        assert list(second) == expected, "the next iteration is whole"
        if stop < len(expected):  # the remaining samples are dealt to two ranks
            parts = []
            for rank in range(2):
                again = loader(rank, 2)
                again.load_state_dict(state)
                parts += flat(again)
            left = set(range(len(dataset))) - set(flat(found))
            assert set(parts) == left
            assert len(parts) == len(left) + len(left) % 2
    whole = loader()
    list(whole)
    state = whole.state_dict()
    after = loader()
    after.sampler.set_epoch(4)
    after.load_state_dict(state)
    epoch = list(after)
    assert sorted(flat(epoch)) == list(range(len(dataset))), "a new epoch after a finished one"
    assert epoch != expected, "epoch 4"
    print("ok")


if __name__ == "__main__":
    main()
