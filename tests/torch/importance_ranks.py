"""One rank of a training job, as a program: URL MEETING WORLD RANK [FAULT].

Each rank reports other losses. The program prints the importance that the rank then knows, and the
samples of two epochs. With a fault, rank 1 differs from rank 0 in one way.
"""

import sys

import torch
import torch.distributed
from torch.utils.data import Subset

from diesel_fs.torch import DieselDataset, ImportanceSampler


def main(url: str, meeting: str, world: str, rank: str, fault: str = "") -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", world_size=int(world), rank=int(rank)
    )
    fault = fault if rank == "1" else ""
    with DieselDataset("pets", loader=len, extensions=".bin", url=url) as pets:
        data = Subset(pets, range(40)) if fault == "subset" else pets
        sampler = ImportanceSampler(data, share=0.5, seed=9)
        epochs = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            given = list(sampler)
            sampler.update(given, torch.tensor([float(each) + int(rank) / 10 for each in given]))
            if fault == "report":
                sampler.update([len(pets)], torch.ones(1))
            epochs.append(",".join(map(str, given)))
        known = ",".join(f"{each:.2f}" for each in sampler.importance.tolist())
    print("|".join([known, *epochs[1:]]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
