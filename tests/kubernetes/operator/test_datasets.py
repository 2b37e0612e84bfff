"""Each transition of a Dataset, each failure, as decisions about what the cluster has."""

from dataclasses import replace

from diesel_kubernetes.operator.datasets import backoff_s, decide, view_of_job
from diesel_kubernetes.operator.fields import Json, at, fields, items, text
from diesel_kubernetes.operator.resources import RECLAIM_FINALIZER, Object, condition_of
from tests.rows import each_row

from .made import DEFAULTS, GOOD, NOW_S, dataset, ended, reader_pod, situation


def after(seen: Object, status: Json) -> Object:
    """The object with another status."""
    return dataset(
        fields(seen.raw, "spec"),
        status,
        generation=seen.generation,
        finalizers=seen.finalizers,
        deleted=seen.is_deleted,
    )


def started(spec: Json | None = None) -> tuple[Object, Json]:
    """A Dataset whose first Job was made, and that Job."""
    seen = dataset(spec)
    decision = decide(situation(seen), DEFAULTS)
    (job,) = decision.create
    return after(seen, decision.status), job


def reason_of(status: Json) -> str:
    return text(condition_of(status, "Ready"), "reason")


def arguments(job: Json) -> list[object]:
    return items(job, "spec", "template", "spec", "containers", 0, "args")


def test_a_new_dataset_gets_a_job_and_an_event() -> None:
    decision = decide(situation(dataset({"keep": 2, "secretName": "account"})), DEFAULTS)
    (job,) = decision.create
    assert decision.status["phase"] == "Preparing"
    assert arguments(job)[2:] == [
        "--describe=pets", "--keep=2", "--", "put", "--jobs=2", "--", "s3://bucket/pets", "pets"
    ]  # fmt: skip
    container = fields(job, "spec", "template", "spec", "containers", 0)
    secret = {"name": "account", "key": "key", "optional": True}
    assert {"name": "DIESEL_KEY", "valueFrom": {"secretKeyRef": secret}} in items(container, "env")
    assert at(job, "metadata", "ownerReferences", 0, "uid") == "uid-of-pets"
    assert at(job, "spec", "backoffLimit") == 0
    assert [each["reason"] for each in decision.events] == ["Running"]


def test_a_running_job_is_waited_for_and_its_progress_shown() -> None:
    seen, job = started()
    running = view_of_job(job, ())
    progress: Json = {"entries": 5, "percent": 50}
    decision = decide(situation(seen, [running], progress=progress), DEFAULTS)
    assert (decision.create, decision.events, decision.again_s) == ((), (), 10.0)
    assert decision.status["progress"] == progress


def test_a_job_that_succeeded_makes_the_dataset_ready_once() -> None:
    seen, job = started()
    done = ended(job, GOOD)
    decision = decide(situation(seen, [done]), DEFAULTS)
    described = {"phase": "Ready", "entries": 3, "files": 2, "bytes": 5, "version": 7}
    assert described.items() <= decision.status.items()
    assert condition_of(decision.status, "Ready")["status"] == "True"
    assert [each["reason"] for each in decision.events] == ["Prepared"]
    ready = after(seen, decision.status)
    again = decide(situation(ready, [done], now_s=NOW_S + 99), DEFAULTS)
    assert (again.status, again.create, again.events) == (ready.status, (), ())
    gone = decide(situation(ready), DEFAULTS)  # the Job was cleaned up
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
    decision = decide(situation(seen, [ended(job, report, failed=True)]), DEFAULTS)
    assert (decision.status["phase"], reason_of(decision.status)) == ("Failed", reason)
    assert condition_of(decision.status, "Ready")["message"] == "what failed; do this"
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
def test_an_error_that_may_go_away_is_tried_again_with_pauses(error: str, reason: str) -> None:
    seen, job = started({"preparation": {"retries": 1}})
    report: Json = {"error": error, "message": "away", "advice": ""} if error else {}
    first = ended(job, report, failed=True)
    waiting = decide(situation(seen, [first], now_s=NOW_S + 3), DEFAULTS)
    assert (waiting.status["phase"], reason_of(waiting.status)) == ("Preparing", reason)
    assert waiting.again_s == backoff_s(1) - 3
    assert not waiting.create
    seen = after(seen, waiting.status)
    due = decide(situation(seen, [first], now_s=NOW_S + backoff_s(1)), DEFAULTS)
    (second,) = due.create
    assert due.status["attempt"] == 2
    assert at(second, "metadata", "name") != at(job, "metadata", "name")
    failed = [first, ended(second, report, failed=True)]
    last = decide(situation(after(seen, due.status), failed, now_s=NOW_S + 999), DEFAULTS)
    assert (last.status["phase"], reason_of(last.status)) == ("Failed", reason)
    assert not last.create


def test_a_deadline_is_no_reason_to_try_again() -> None:
    seen, job = started({"preparation": {"deadlineSeconds": 60}})
    assert at(job, "spec", "activeDeadlineSeconds") == 60
    late = replace(ended(job, {}, failed=True), reason="DeadlineExceeded")
    decision = decide(situation(seen, [late]), DEFAULTS)
    assert (decision.status["phase"], reason_of(decision.status)) == ("Failed", "DeadlineExceeded")


def test_a_job_that_was_deleted_is_made_again() -> None:
    seen, job = started()
    decision = decide(situation(seen), DEFAULTS)
    assert decision.create == (job,)
    leaving = replace(view_of_job(job, ()), is_leaving=True)
    assert not decide(situation(seen, [leaving]), DEFAULTS).create


def test_a_change_of_the_spec_ends_the_old_job_before_it_makes_the_new_one() -> None:
    seen, job = started()
    changed = dataset({"refresh": "again"}, seen.status, generation=2)
    running = view_of_job(job, ())
    decision = decide(situation(changed, [running]), DEFAULTS)
    assert (decision.create, decision.delete_jobs) == ((), (running.name,))
    assert reason_of(decision.status) == "Replacing"
    decision = decide(situation(after(changed, decision.status)), DEFAULTS)
    (new,) = decision.create
    assert at(new, "metadata", "name") != at(job, "metadata", "name")
    assert decision.status["attempt"] == 1


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
def test_a_spec_that_means_nothing_is_refused_by_name(spec: Json, field: str) -> None:
    decision = decide(situation(dataset(spec)), DEFAULTS)
    assert (decision.status["phase"], reason_of(decision.status)) == ("Failed", "InvalidSpec")
    message = text(condition_of(decision.status, "Ready"), "message")
    assert field in message
    assert "u:p" not in message
    assert not decision.create


def test_an_existing_dataset_is_only_looked_at() -> None:
    decision = decide(situation(dataset({"source": {"existing": {"version": 9}}})), DEFAULTS)
    assert arguments(decision.create[0])[2:] == ["--describe=pets@9"]


@each_row(
    ("source", "words"),
    [
        (
            {"bucket": {"url": "s3://b/$(x); rm", "include": ["--tar=x"], "delete": True}},
            ["--delete", "--include=--tar=x", "--", "s3://b/$$(x); rm"],
        ),
        (
            {"archives": {"urls": ["s3://b/x.tar"], "manifest": "https://host/labels.csv?a=1"}},
            ["--manifest=https://host/labels.csv?a=1", "--unpack", "--", "s3://b/x.tar"],
        ),
    ],
    ids=["a bucket", "archives with a manifest"],
)
def test_what_users_name_is_one_argument(source: Json, words: list[str]) -> None:
    (job,) = decide(situation(dataset({"source": source})), DEFAULTS).create
    assert arguments(job)[4:] == ["put", "--jobs=2", *words, "pets"]


DELETE: Json = {"reclaimPolicy": "Delete"}


def test_the_finalizer_is_there_only_if_data_are_to_be_deleted() -> None:
    assert decide(situation(dataset(DELETE)), DEFAULTS).add_finalizer
    assert not decide(situation(dataset()), DEFAULTS).add_finalizer
    kept = decide(situation(dataset(finalizers=[RECLAIM_FINALIZER])), DEFAULTS)
    assert kept.remove_finalizer


def test_deletion_waits_for_readers_and_preparations_then_deletes_the_data() -> None:
    seen = dataset(DELETE, finalizers=[RECLAIM_FINALIZER])
    (job,) = decide(situation(seen), DEFAULTS).create
    gone = dataset(DELETE, finalizers=[RECLAIM_FINALIZER], deleted=True)
    running = view_of_job(job, ())

    decision = decide(situation(gone, [running], [reader_pod("a")]), DEFAULTS)
    assert reason_of(decision.status) == "InUse"
    assert (decision.delete_jobs, decision.remove_finalizer) == ((), False)

    done_pod = reader_pod("a", phase="Succeeded")
    decision = decide(situation(gone, [running], [done_pod]), DEFAULTS)
    assert (reason_of(decision.status), decision.delete_jobs) == ("Stopping", (running.name,))

    decision = decide(situation(gone, [], [done_pod]), DEFAULTS)
    (reclaim,) = decision.create
    assert arguments(reclaim)[2:] == ["--", "delete-dataset", "pets", "--yes"]
    assert "ownerReferences" not in fields(reclaim, "metadata")
    assert not decision.remove_finalizer

    failed = ended(reclaim, {"error": "ObjectStoreError", "message": "away"}, failed=True)
    decision = decide(situation(gone, [failed]), DEFAULTS)
    assert (decision.create, decision.remove_finalizer) == ((), False)
    decision = decide(situation(gone, [failed], now_s=NOW_S + 999), DEFAULTS)
    (second,) = decision.create

    ends: list[tuple[Json, bool]] = [
        ({"done": True}, False),
        ({"error": "NoSuchDataset", "message": ""}, True),
    ]
    for report, is_failed in ends:
        decision = decide(situation(gone, [ended(second, report, failed=is_failed)]), DEFAULTS)
        assert decision.remove_finalizer
        assert decision.delete_jobs == (text(second, "metadata", "name"),)


def test_retain_lets_a_deleted_dataset_go() -> None:
    gone = dataset(finalizers=[RECLAIM_FINALIZER], deleted=True)
    decision = decide(situation(gone), DEFAULTS)
    assert decision.remove_finalizer
    assert not decision.create


def test_nodes_have_a_share_of_a_task_and_cached_ones_stay() -> None:
    seen, job = started()
    seen = after(seen, decide(situation(seen, [ended(job, GOOD)]), DEFAULTS).status)
    pods = [
        reader_pod("a", task="t", cacheDir="c"),
        reader_pod("b", task="t"),
        reader_pod("c", job="alone"),
    ]

    def node(name: str, state: str, share: int, *, keeps: bool) -> Json:
        return {"name": name, "state": state, "share": share, "keeps": keeps, "measured": False}

    status = decide(situation(seen, pods=pods), DEFAULTS).status
    assert status["nodes"] == [
        node("a", "Active", 50, keeps=True),
        node("b", "Active", 50, keeps=False),
        node("c", "Active", 100, keeps=False),
    ]
    status = decide(situation(after(seen, status)), DEFAULTS).status
    assert status["nodes"] == [node("a", "Cached", 50, keeps=True)]


def pod_of(job: Json, status: Json) -> Json:
    """The pod of a Job."""
    return {"metadata": {"labels": {"job-name": at(job, "metadata", "name")}}, "status": status}


@each_row("message", ["", "no json", "[1]", '{"dataset": 3}', '{"error": 5}'])
def test_a_pod_may_report_anything(message: str) -> None:
    seen, job = started()
    pod = pod_of(job, {"containerStatuses": [{"state": {"terminated": {"message": message}}}]})
    status: Json = {"conditions": [{"type": "Failed", "status": "True",
                                    "lastTransitionTime": "2027-01-15T08:00:00Z"}]}  # fmt: skip
    view = view_of_job({**job, "status": status}, [pod])
    assert view.finished_s == NOW_S
    decision = decide(situation(seen, [view]), DEFAULTS)
    assert reason_of(decision.status) == "Interrupted"


@each_row(("version", "is_done"), [(0, True), (7, False)])
def test_a_store_that_is_not_there_holds_a_dataset_only_if_it_was_there_before(
    version: int, is_done: bool
) -> None:
    gone = dataset(DELETE, {"version": version}, finalizers=[RECLAIM_FINALIZER], deleted=True)
    (reclaim,) = decide(situation(gone), DEFAULTS).create
    report: Json = {"error": "ObjectMissing", "message": "no store"}
    decision = decide(situation(gone, [ended(reclaim, report, failed=True)]), DEFAULTS)
    assert decision.remove_finalizer == is_done


def test_a_pod_that_cannot_start_says_why() -> None:
    seen, job = started()
    why = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    pod = pod_of(job, {"conditions": [why]})
    decision = decide(situation(seen, [view_of_job(job, [pod])]), DEFAULTS)
    assert reason_of(decision.status) == "Running"
    assert "0/3 nodes" in text(condition_of(decision.status, "Ready"), "message")
