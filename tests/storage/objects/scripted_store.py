"""Object stores on a scripted S3 server, with small limits, and sleeps that take no time."""

import time
from dataclasses import dataclass, field

from diesel_fs.storage.objects.cloud.answers import AttemptLimits
from diesel_fs.storage.objects.cloud.store import open_cloud
from diesel_fs.storage.objects.retry import RetryClock, RetryingStore, RetryPolicy
from tests.storage.objects.s3_server import credentials
from tests.storage.objects.scripted_s3 import BUCKET, ScriptedS3

PREFIX = "some/prefix"
URL = f"s3://{BUCKET}/{PREFIX}"
DATASET = "datasets/" + "0f" * 16
CHUNKS = f"{DATASET}/chunks/"
LEASE = f"{DATASET}/leases/node-1"
LIMITS = AttemptLimits(connect_s=2, stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=1 << 24)
POLICY = RetryPolicy(deadline_s=3, put_deadline_s=3, bytes_per_s_min=1 << 23)


def chunk(text: str) -> str:
    text = text.ljust(22, "-")
    return f"{CHUNKS}{text[:4]}/{text}"


def key(name: str) -> str:
    return f"{PREFIX}/{name}"


@dataclass(slots=True)
class VirtualSleep:
    """Records pauses instead of sleeping; for the retry policy, their time passes."""

    slept: list[float] = field(default_factory=list)

    def clock(self) -> RetryClock:
        return RetryClock(
            now=lambda: time.monotonic() + sum(self.slept),
            sleep=self.slept.append,
            draw=lambda: 0.5,
        )


def store_on(
    server: ScriptedS3,
    sleeps: VirtualSleep,
    *,
    limits: AttemptLimits = LIMITS,
    policy: RetryPolicy = POLICY,
) -> RetryingStore:
    """A new store that has already probed the server; `server.requests` is empty again."""
    store = open_cloud(
        URL,
        create=True,
        environ=credentials(server.endpoint),
        limits=limits,
        policy=policy,
        clock=sleeps.clock(),
    )
    store.put(chunk("first"), [b"x"])
    store.delete(chunk("first"))
    server.requests.clear()
    return store


@dataclass(slots=True)
class ScriptedBucket:
    """The store has sent the server no request yet."""

    server: ScriptedS3
    sleeps: VirtualSleep
    store: RetryingStore
