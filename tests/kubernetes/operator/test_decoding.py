"""JSON of the API and dataclasses: wrong types become defaults, and a status survives both ways."""

from hypothesis import given
from hypothesis import strategies as st

from diesel_kubernetes.operator.api_objects import Pod
from diesel_kubernetes.operator.decoding import decode, encode
from diesel_kubernetes.operator.resources import (
    DatasetStatus,
    GivenDataset,
    GivenTraining,
    TrainingStatus,
)
from tests.kubernetes.fields import Json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def test_names_and_types_are_those_of_the_api() -> None:
    state = {"name": "a", "state": {"running": {}, "terminated": {"exitCode": 3}}}
    labels = {"team": "x", "number": 5}
    raw: Json = {
        "metadata": {"name": "pod", "labels": labels, "ownerReferences": [{"uid": "u"}, 5]},
        "spec": {"nodeName": "n", "unknown": 1},
        "status": {"podIP": "10.0.0.1", "phase": 7, "containerStatuses": [state]},
    }
    pod = decode(Pod, raw)
    assert (pod.name, pod.spec.node_name, pod.status.pod_ip) == ("pod", "n", "10.0.0.1")
    assert pod.metadata.labels == {"team": "x"}
    assert pod.metadata.is_owned_by("u")
    assert pod.status.phase == ""
    assert pod.first_state.running == {}
    assert pod.first_state.terminated.exit_code == 3


@given(st.dictionaries(st.sampled_from(["source", "keep", "warmUp", "datasets", "nodes"]), values))
def test_any_object_is_decoded(raw: Json) -> None:
    for kind in (GivenDataset, GivenTraining, DatasetStatus, TrainingStatus, Pod):
        made = decode(kind, raw)
        assert type(made) is kind
    assert type(decode(GivenDataset, raw).keep) is int


def test_a_status_is_the_same_after_both_ways() -> None:
    node = {"name": "a", "state": "Active", "share": 5, "keeps": True, "measured": False}
    condition = {"type": "Ready", "status": "True", "reason": "r", "message": "m",
                 "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 2}  # fmt: skip
    raw: Json = {
        "phase": "Ready", "observedGeneration": 2, "conditions": [condition], "attempt": 0,
        "bytes": 7, "progress": {"entries": 1}, "nodes": [node],
    }  # fmt: skip
    assert encode(decode(DatasetStatus, raw)) == raw
