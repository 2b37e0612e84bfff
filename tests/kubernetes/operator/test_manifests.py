"""The manifests of the operator, its examples, and what it makes: the published schemas."""

from pathlib import Path
from typing import cast

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from diesel_kubernetes.operator import main
from diesel_kubernetes.operator.datasets import decide as decide_dataset
from diesel_kubernetes.operator.fields import Json, at, fields, items, text
from diesel_kubernetes.operator.objects import (
    PlannedVolume,
    key_secret,
    reclaim_job,
)
from diesel_kubernetes.operator.resources import (
    DatasetPhase,
    TrainingPhase,
    parse_dataset,
    parse_object,
    parse_training,
)
from diesel_kubernetes.operator.training import Situation
from diesel_kubernetes.operator.training import decide as decide_training

from .made import DEFAULTS, NOW_S, dataset, situation, training_job
from .test_training import NODES, READY

BASE = Path(__file__).resolve().parents[3] / "deploy/kubernetes/base/operator"
FOLDERS = (BASE.parent / "definitions", BASE, BASE.parent / "operator-secrets")
EXAMPLES = BASE.parents[1] / "examples/operator"
OLDEST = "1.27"
VERSIONS = pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])


def documents(path: Path) -> list[Json]:
    """The objects in a file."""
    return [cast("Json", each) for each in yaml.safe_load_all(path.read_text())]


def manifests() -> list[Json]:
    """The objects of the operator's manifests."""
    found = [path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))]
    names = [path for path in found if path.name != "kustomization.yaml"]
    return [each for path in names for each in documents(path)]


def definition(plural: str) -> Json:
    """The schema of a resource."""
    (found,) = [
        each for each in manifests() if at(each, "metadata", "name") == f"{plural}.diesel-fs.dev"
    ]
    return fields(found, "spec", "versions", 0, "schema", "openAPIV3Schema", "properties")


@VERSIONS
def test_manifests_have_the_published_schemas(version: str) -> None:
    found = manifests()
    assert len(found) > 9
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)


@VERSIONS
def test_what_the_operator_makes_has_the_published_schemas(version: str) -> None:
    spec: Json = {
        "secretName": "account",
        "url": "file:///data/store",
        "placement": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
        "preparation": {"resources": {"requests": {"cpu": "1"}}, "deadlineSeconds": 5},
    }
    seen = dataset(spec)
    decision = decide_dataset(situation(seen), DEFAULTS)
    made = [*decision.create, *decision.events]
    made.append(reclaim_job(seen, parse_dataset(seen, DEFAULTS), 1, DEFAULTS))
    found = {"pets": dataset({"url": "diesel://host:1", "secretName": "account"}, READY).raw}
    job = training_job()
    admitted = decide_training(Situation(job, found, (), NOW_S, NODES), DEFAULTS)
    started = decide_training(
        Situation(training_job(status=admitted.status), found, (), NOW_S), DEFAULTS
    )
    made += [*started.create, *admitted.events]
    made.append(key_secret(job, "key", {"user": "eA==", "other": "eA=="}, "task key"))
    kinds = {text(each, "kind") for each in made}
    assert kinds == {"Job", "Pod", "Service", "Event", "Secret"}
    for each in made:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_secret_with_a_task_key_has_nothing_that_volumes_refuse() -> None:
    secret = key_secret(training_job(), "key", {"user": "eA==", "other": "eA=="}, "task key")
    assert fields(secret, "data") == {"user": "eA=="}
    assert PlannedVolume("a", "/a", {}, "key", "account").to_json()["keyFrom"] == "account"


def test_the_examples_are_taken() -> None:
    (example,) = documents(EXAMPLES / "dataset.yaml")
    spec = parse_dataset(parse_object(example), DEFAULTS)
    assert spec.put[-3:] == (
        "s3://data.example/pets/*.tar.gz", "https://data.example/pets-extra.zip", "pets"
    )  # fmt: skip
    (example,) = documents(EXAMPLES / "trainingjob.yaml")
    assert parse_training(parse_object(example)).replicas == 4


def test_the_schemas_have_all_phases() -> None:
    for plural, phases in (("datasets", DatasetPhase), ("trainingjobs", TrainingPhase)):
        allowed = items(definition(plural), "status", "properties", "phase", "enum")
        assert sorted(map(str, allowed)) == sorted(phases)


def test_kustomize_has_all_files() -> None:
    for folder in FOLDERS:
        (listed,) = documents(folder / "kustomization.yaml")
        there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert sorted(map(str, items(listed, "resources"))) == sorted(there)


def test_the_deployment_starts_the_program() -> None:
    (deployment,) = [each for each in manifests() if each["kind"] == "Deployment"]
    container = fields(deployment, "spec", "template", "spec", "containers", 0)
    assert container["command"] == ["diesel-operator"]
    options = {name for each in main.program.params for name in each.opts}
    for word in items(container, "args"):
        assert str(word).partition("=")[0] in options
    shown = CliRunner().invoke(main.program, ["--help"])
    assert shown.exit_code == 0
    assert "KUBECONFIG" in shown.output


def test_rights_are_no_wider_than_needed() -> None:
    """No wildcard, no list of Secrets, no change of pods or nodes."""
    rules = [rule for each in manifests() for rule in items(each, "rules")]
    assert rules
    for rule in rules:
        verbs, resources = items(rule, "verbs"), items(rule, "resources")
        assert "*" not in [*verbs, *resources, *items(rule, "apiGroups")]
        if "secrets" in resources:
            assert not {"list", "watch"} & set(map(str, verbs))
        if {"pods", "nodes"} & set(map(str, resources)):
            assert not {"update", "patch"} & set(map(str, verbs))
