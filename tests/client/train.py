"""A training script as users write it: PyTorch's DataLoader over a dataset, with two workers.

`train.py URL START EPOCHS` prints as JSON, for each epoch, the path and the SHA-256 of each file
that the workers have read. START is the start method of multiprocessing.
"""

import hashlib
import json
import sys

import torch

import diesel_fs


class Files:
    def __init__(self, dataset: diesel_fs.Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[str, str]:
        content = self.dataset.get(index)
        assert "obstore" not in sys.modules, "its runtime hangs in forked children"
        path = self.dataset.snapshot.path(index).decode()
        return path, hashlib.sha256(content).hexdigest()


def main() -> None:
    url, start, epochs = sys.argv[1:]
    with diesel_fs.connect("pets", url=url) as dataset:
        dataset.get(dataset.snapshot.files()[0])  # the parent reads before it forks
        for epoch in range(int(epochs)):
            loader = torch.utils.data.DataLoader(
                Files(dataset),
                batch_size=8,
                sampler=dataset.shuffle(seed=1, epoch=epoch).tolist(),
                num_workers=2,
                multiprocessing_context=start,
                collate_fn=list,
            )
            print(json.dumps([each for batch in loader for each in batch]))
        assert "obstore" not in sys.modules


if __name__ == "__main__":
    main()
