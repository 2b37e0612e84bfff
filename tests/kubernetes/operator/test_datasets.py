"""Each transition of a Dataset, each failure, as decisions about objects of the cluster."""

from dataclasses import replace

from diesel_kubernetes.operator.datasets import backoff_s
from diesel_kubernetes.operator.decoding import encode
from diesel_kubernetes.operator.resources import (
    RECLAIM_FINALIZER,
    DatasetObject,
    DatasetStatus,
    NodeShare,
    Progress,
    decode_dataset,
)
from tests.kubernetes.fields import Json, at, fields, items, text
from tests.rows import each_row

from .made import GOOD, NOW_S, dataset, decided, ended, reader_pod, view


def after(seen: DatasetObject, status: DatasetStatus) -> DatasetObject:
    return decode_dataset({**seen.raw, "status": encode(status)})


def started(spec: Json | None = None) -> tuple[DatasetObject, Json]:
    seen = dataset(spec)
    decision = decided(seen)
    (job,) = decision.create
    return after(seen, decision.status), job


def reason_of(status: DatasetStatus) -> str:
    return status.condition("Ready").reason


def arguments(job: Json) -> list[object]:
    return items(job, "spec", "template", "spec", "containers", 0, "args")


def test_a_new_dataset_gets_a_job_and_an_event() -> None:
    decision = decided(dataset({"secretName": "account"}))
    (job,) = decision.create
    assert decision.status.phase == "Preparing"
    container = fields(job, "spec", "template", "spec", "containers", 0)
    secret = {"name": "account", "key": "key", "optional": True}
    assert {"name": "DIESEL_KEY", "valueFrom": {"secretKeyRef": secret}} in items(container, "env")
    assert at(job, "metadata", "ownerReferences", 0, "uid") == "uid-of-pets"
    assert at(job, "spec", "backoffLimit") == 0
    assert [each["reason"] for each in decision.events] == ["Running"]


def test_a_running_job_shows_its_progress() -> None:
    seen, job = started()
    running = view(job)
    progress = Progress(entries=5, percent=50)
    decision = decided(seen, [running], progress=progress)
    assert (decision.create, decision.events, decision.again_s) == ((), (), 10.0)
    assert decision.status.progress == progress


def test_a_job_that_succeeded_makes_the_dataset_ready_once() -> None:
    seen, job = started()
    done = ended(job, GOOD)
    decision = decided(seen, [done])
    described = {"phase": "Ready", "entries": 3, "files": 2, "bytes": 5, "version": 7}
    assert described.items() <= encode(decision.status).items()
    assert decision.status.condition("Ready").holds
    assert [each["reason"] for each in decision.events] == ["Prepared"]
    ready = after(seen, decision.status)
    again = decided(ready, [done], now_s=NOW_S + 99)
    assert (again.status, again.create, again.events) == (ready.status, (), ())
    gone = decided(ready)  # the Job was cleaned up
    assert not gone.create


@each_row(
    ("error", "reason"),
    [
        ("UsageError", "InvalidUsage"),
        ("NoSuchPath", "NotFound"),
        ("PermissionDenied", "Denied"),
        ("ObjectStoreRefused", "Denied"),
        ("ObjectMissing", "StoreMissing"),
        ("PartialError", "Partial"),
        ("CorruptError", "Corrupt"),
    ],
)
def test_an_error_that_stays_fails_the_dataset_at_once(error: str, reason: str) -> None:
    seen, job = started()
    report: Json = {"error": error, "message": "what failed", "advice": "do this"}
    decision = decided(seen, [ended(job, report, failed=True)])
    assert (decision.status.phase, reason_of(decision.status)) == ("Failed", reason)
    assert decision.status.condition("Ready").message == "what failed; do this"
    assert (decision.create, decision.again_s) == ((), None)
    assert decision.events[0]["type"] == "Warning"


@each_row(
    ("error", "reason"),
    [
        ("BusyError", "Busy"),
        ("ObjectStoreError", "StoreUnreachable"),
        ("MetadataError", "MetadataUnreachable"),
        ("NoSpaceError", "NoSpace"),
        ("", "Interrupted"),
    ],
)
def test_an_error_that_may_end_is_tried_again_with_pauses(error: str, reason: str) -> None:
    seen, job = started({"preparation": {"retries": 1}})
    report: Json = {"error": error, "message": "away", "advice": ""} if error else {}
    first = ended(job, report, failed=True)
    waiting = decided(seen, [first], now_s=NOW_S + 3)
    assert (waiting.status.phase, reason_of(waiting.status)) == ("Preparing", reason)
    assert waiting.again_s == backoff_s(1) - 3
    assert not waiting.create
    seen = after(seen, waiting.status)
    due = decided(seen, [first], now_s=NOW_S + backoff_s(1))
    (second,) = due.create
    assert due.status.attempt == 2
    assert at(second, "metadata", "name") != at(job, "metadata", "name")
    failed = [first, ended(second, report, failed=True)]
    last = decided(after(seen, due.status), failed, now_s=NOW_S + 999)
    assert (last.status.phase, reason_of(last.status)) == ("Failed", reason)
    assert not last.create


def test_a_job_past_its_deadline_is_not_tried_again() -> None:
    seen, job = started({"preparation": {"deadlineSeconds": 60}})
    assert at(job, "spec", "activeDeadlineSeconds") == 60
    late = replace(ended(job, {}, failed=True), reason="DeadlineExceeded")
    decision = decided(seen, [late])
    assert (decision.status.phase, reason_of(decision.status)) == ("Failed", "DeadlineExceeded")


def test_a_job_that_was_deleted_is_made_again() -> None:
    seen, job = started()
    decision = decided(seen)
    assert decision.create == (job,)
    leaving = replace(view(job), is_leaving=True)
    assert not decided(seen, [leaving]).create


def test_a_change_of_the_spec_ends_the_old_job_before_it_makes_the_new_one() -> None:
    seen, job = started()
    changed = dataset({"refresh": "again"}, seen.status, generation=2)
    running = view(job)
    decision = decided(changed, [running])
    assert (decision.create, decision.delete_jobs) == ((), (running.name,))
    assert reason_of(decision.status) == "Replacing"
    decision = decided(after(changed, decision.status))
    (new,) = decision.create
    assert at(new, "metadata", "name") != at(job, "metadata", "name")
    assert decision.status.attempt == 1


@each_row(
    ("spec", "field"),
    [
        ({"url": ""}, "spec.url"),
        ({"url": "s3://key@bucket"}, "spec.url"),
        ({"url": "file:///etc"}, "spec.url"),
        ({"url": "file:///data/../etc"}, "spec.url"),
        ({"url": "file:///data/store?meta=/etc/passwd"}, "spec.url"),
        ({"dataset": "-x"}, "spec.dataset"),
        ({"source": {}}, "spec.source"),
        ({"source": {"existing": {}, "bucket": {"url": "s3://b"}}}, "spec.source"),
        ({"source": {"bucket": {"url": "/etc"}}}, "spec.source.bucket.url"),
        ({"source": {"archives": {"urls": ["--delete"]}}}, "spec.source.archives.urls"),
        ({"source": {"archives": {"urls": ["https://u:p@host/a"]}}}, "spec.source.archives.urls"),
        (
            {"source": {"archives": {"urls": ["s3://b/a.tar"], "manifest": "/etc/passwd"}}},
            "spec.source.archives.manifest",
        ),
        ({"source": {"existing": {}}, "reclaimPolicy": "Delete"}, "spec.reclaimPolicy"),
        ({"source": {"existing": {}}, "keep": 1}, "spec.keep"),
    ],
)
def test_a_senseless_spec_is_refused_by_name(spec: Json, field: str) -> None:
    decision = decided(dataset(spec))
    assert (decision.status.phase, reason_of(decision.status)) == ("Failed", "InvalidSpec")
    message = decision.status.condition("Ready").message
    assert field in message
    assert "u:p" not in message
    assert not decision.create


@each_row(
    ("spec", "words"),
    [
        ({"keep": 2}, ["--keep=2", "--", "put", "--jobs=2", "--", "s3://bucket/pets", "pets"]),
        (
            {"source": {"bucket": {"url": "s3://b/$(x); rm", "include": ["--tar=x"],
                                   "delete": True}}},
            ["--", "put", "--jobs=2", "--delete", "--include=--tar=x", "--", "s3://b/$$(x); rm",
             "pets"],
        ),
        (
            {"source": {"archives": {"urls": ["s3://b/x.tar"], "manifest": "https://h/x.csv?a=1"}}},
            ["--", "put", "--jobs=2", "--manifest=https://h/x.csv?a=1", "--unpack", "--",
             "s3://b/x.tar", "pets"],
        ),
    ],
    ids=["versions to keep", "what users name is one argument", "archives with a manifest"],
)  # fmt: skip
def test_the_arguments_of_a_preparation(spec: Json, words: list[str]) -> None:
    (job,) = decided(dataset(spec)).create
    assert arguments(job)[2:] == ["--describe=pets", *words]


def test_an_existing_dataset_is_only_read() -> None:
    (job,) = decided(dataset({"source": {"existing": {"version": 9}}})).create
    assert arguments(job)[2:] == ["--describe=pets@9"]


DELETE: Json = {"reclaimPolicy": "Delete"}


def test_the_finalizer_is_there_only_if_data_are_to_be_deleted() -> None:
    assert decided(dataset(DELETE)).add_finalizer
    assert not decided(dataset()).add_finalizer
    for is_deleted in (False, True):
        kept = decided(dataset(finalizers=[RECLAIM_FINALIZER], deleted=is_deleted))
        assert kept.remove_finalizer
        assert bool(kept.create) == (not is_deleted)


def test_deletion_waits_for_readers_and_preparations_then_deletes_the_data() -> None:
    seen = dataset(DELETE, finalizers=[RECLAIM_FINALIZER])
    (job,) = decided(seen).create
    gone = dataset(DELETE, finalizers=[RECLAIM_FINALIZER], deleted=True)
    running = view(job)

    decision = decided(gone, [running], [reader_pod("a")])
    assert reason_of(decision.status) == "InUse"
    assert (decision.delete_jobs, decision.remove_finalizer) == ((), False)

    done_pod = reader_pod("a", phase="Succeeded")
    decision = decided(gone, [running], [done_pod])
    assert (reason_of(decision.status), decision.delete_jobs) == ("Stopping", (running.name,))

    decision = decided(gone, [], [done_pod])
    (reclaim,) = decision.create
    assert arguments(reclaim)[2:] == ["--", "delete-dataset", "pets", "--yes"]
    assert "ownerReferences" not in fields(reclaim, "metadata")
    assert not decision.remove_finalizer

    failed = ended(reclaim, {"error": "ObjectStoreError", "message": "away"}, failed=True)
    decision = decided(gone, [failed])
    assert (decision.create, decision.remove_finalizer) == ((), False)
    decision = decided(gone, [failed], now_s=NOW_S + 999)
    (second,) = decision.create

    ends: list[tuple[Json, bool]] = [
        ({"done": True}, False),
        ({"error": "NoSuchDataset", "message": ""}, True),
    ]
    for report, is_failed in ends:
        decision = decided(gone, [ended(second, report, failed=is_failed)])
        assert decision.remove_finalizer
        assert decision.delete_jobs == (text(second, "metadata", "name"),)


def test_nodes_have_a_share_of_a_task_and_cached_ones_stay() -> None:
    seen, job = started()
    seen = after(seen, decided(seen, [ended(job, GOOD)]).status)
    pods = [
        reader_pod("a", task="t", cacheDir="c"),
        reader_pod("b", task="t"),
        reader_pod("c", job="alone"),
    ]

    status = decided(seen, pods=pods).status
    assert status.nodes == (
        NodeShare("a", "Active", 50, keeps=True),
        NodeShare("b", "Active", 50, keeps=False),
        NodeShare("c", "Active", 100, keeps=False),
    )
    status = decided(after(seen, status)).status
    assert status.nodes == (NodeShare("a", "Cached", 50, keeps=True),)


def pod_of(job: Json, status: Json) -> Json:
    return {"metadata": {"labels": {"job-name": at(job, "metadata", "name")}}, "status": status}


@each_row("message", ["", "no json", "[1]", '{"dataset": 3}', '{"error": 5}'])
def test_a_pod_may_report_anything(message: str) -> None:
    seen, job = started()
    pod = pod_of(job, {"containerStatuses": [{"state": {"terminated": {"message": message}}}]})
    status: Json = {"conditions": [{"type": "Failed", "status": "True",
                                    "lastTransitionTime": "2027-01-15T08:00:00Z"}]}  # fmt: skip
    found = view({**job, "status": status}, [pod])
    assert found.finished_s == NOW_S
    decision = decided(seen, [found])
    assert reason_of(decision.status) == "Interrupted"


@each_row(("version", "is_done"), [(0, True), (7, False)])
def test_a_missing_store_holds_only_an_existing_dataset(version: int, is_done: bool) -> None:
    gone = dataset(DELETE, {"version": version}, finalizers=[RECLAIM_FINALIZER], deleted=True)
    (reclaim,) = decided(gone).create
    report: Json = {"error": "ObjectMissing", "message": "no store"}
    decision = decided(gone, [ended(reclaim, report, failed=True)])
    assert decision.remove_finalizer == is_done


def test_a_pod_that_cannot_start_reports_the_reason() -> None:
    seen, job = started()
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    pod = pod_of(job, {"conditions": [why]})
    decision = decided(seen, [view(job, [pod])])
    assert reason_of(decision.status) == "Running"
    assert "0/3 nodes" in decision.status.condition("Ready").message
