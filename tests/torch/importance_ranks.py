"""One rank of a training job: URL MEETING WORLD RANK. Each rank reports other losses; prints what
it then knows, and the samples of two epochs."""

import sys

import torch
import torch.distributed

from diesel_fs.torch import DieselDataset, ImportanceSampler


def main(url: str, meeting: str, world: str, rank: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", world_size=int(world), rank=int(rank)
    )
    with DieselDataset("pets", loader=len, extensions=".bin", url=url) as pets:
        sampler = ImportanceSampler(pets, share=0.5, seed=9)
        epochs = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            given = list(sampler)
            sampler.update(given, torch.tensor([float(each) + int(rank) / 10 for each in given]))
            epochs.append(",".join(map(str, given)))
        known = ",".join(f"{each:.2f}" for each in sampler.importance.tolist())
    print("|".join([known, *epochs[1:]]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
