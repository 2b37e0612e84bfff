"""Decodes a JPEG of about 110 KiB again and again, in a process for each processor.

    python decoding_program.py SECONDS

It prints the images and the bytes (of JPEG) a second as JSON.
"""

import io
import json
import multiprocessing
import os
import sys
import time

import numpy as np
from PIL import Image

WIDTH, HEIGHT, QUALITY = 500, 375, 90  # as an image of ImageNet
SMOOTHNESS = 3  # pixels of noise that are one value: with it the file has about 110 KiB


def jpeg() -> bytes:
    """An image of noise, which has the size and the number of bytes of a photo."""
    rows, columns = HEIGHT // SMOOTHNESS, WIDTH // SMOOTHNESS + 1
    noise = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8)
    image = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def rate(data: bytes, seconds: float) -> float:
    """Images a second of one process."""
    count, start_s = 0, time.perf_counter()
    while (now_s := time.perf_counter()) < start_s + seconds:
        Image.open(io.BytesIO(data)).convert("RGB")
        count += 1
    return count / (now_s - start_s)


def main(seconds: str) -> None:
    """Decode, and print the rates."""
    data, processes = jpeg(), len(os.sched_getaffinity(0))
    with multiprocessing.Pool(processes) as pool:
        images = sum(pool.starmap(rate, [(data, float(seconds))] * processes))
    print(json.dumps({"images": images, "bytes": images * len(data), "file_bytes": len(data)}))


if __name__ == "__main__":
    main(sys.argv[1])
