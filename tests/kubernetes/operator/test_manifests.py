"""The manifests of the operator, its examples, and the objects that it makes: the published
schemas."""

from click.testing import CliRunner

from diesel_kubernetes.operator import main
from diesel_kubernetes.operator.decoding import encode
from diesel_kubernetes.operator.objects import key_secret, reclaim_job
from diesel_kubernetes.operator.resources import (
    DatasetPhase,
    PlannedVolume,
    TrainingPhase,
    decode_dataset,
    decode_training,
)
from diesel_kubernetes.operator.specs import parse_dataset, parse_training
from tests.deploy.manifests import KUBERNETES, read
from tests.kubernetes.fields import Json, at, fields, items, text
from tests.kubernetes.manifests import check_schemas, objects

from .made import DEFAULTS, dataset, decided, training_job
from .test_training import READY
from .test_training import decided as decided_on_job

BASE, EXAMPLES = KUBERNETES / "base", KUBERNETES / "examples/operator"
MANIFESTS = objects(BASE / "definitions", BASE / "operator", BASE / "operator-secrets")


def test_manifests_have_the_published_schemas() -> None:
    assert len(MANIFESTS) > 9
    check_schemas(MANIFESTS)


def test_objects_that_the_operator_makes_have_the_published_schemas() -> None:
    spec: Json = {
        "secretName": "account",
        "url": "file:///data/store",
        "placement": {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
        "preparation": {"resources": {"requests": {"cpu": "1"}}, "deadlineSeconds": 5},
    }
    seen = dataset(spec)
    decision = decided(seen)
    made = [*decision.create, *decision.events]
    made.append(reclaim_job(seen, parse_dataset(seen, DEFAULTS), 1, DEFAULTS))
    found = [dataset({"url": "diesel://host:1", "secretName": "account"}, READY)]
    admitted = decided_on_job(datasets=found)
    made += [*decided_on_job(status=admitted.status).create, *admitted.events]
    secret = key_secret(training_job(), "key", {"user": "eA==", "other": "eA=="}, "task key")
    assert fields(secret, "data") == {"user": "eA=="}, "volumes would refuse another name"
    assert encode(PlannedVolume("a", "/a", {}, "key", "account"))["keyFrom"] == "account"
    made.append(secret)
    kinds = {text(each, "kind") for each in made}
    assert kinds == {"Job", "Pod", "Service", "Event", "Secret"}
    check_schemas(made)


def test_the_examples_are_accepted() -> None:
    (example,) = read(EXAMPLES / "dataset.yaml")
    spec = parse_dataset(decode_dataset(example), DEFAULTS)
    assert spec.put[-3:] == (
        "s3://data.example/pets/*.tar.gz", "https://data.example/pets-extra.zip", "pets"
    )  # fmt: skip
    (example,) = read(EXAMPLES / "trainingjob.yaml")
    assert parse_training(decode_training(example)).replicas == 4


def test_the_schemas_have_all_phases() -> None:
    for plural, phases in (("datasets", DatasetPhase), ("trainingjobs", TrainingPhase)):
        name = f"{plural}.diesel-fs.dev"
        (found,) = [each for each in MANIFESTS if at(each, "metadata", "name") == name]
        schema = fields(found, "spec", "versions", 0, "schema", "openAPIV3Schema", "properties")
        allowed = items(schema, "status", "properties", "phase", "enum")
        assert sorted(map(str, allowed)) == sorted(phases)


def test_the_deployment_starts_the_program() -> None:
    (deployment,) = [each for each in MANIFESTS if each["kind"] == "Deployment"]
    container = fields(deployment, "spec", "template", "spec", "containers", 0)
    assert container["command"] == ["diesel-operator"]
    options = {name for each in main.program.params for name in each.opts}
    assert {str(word).partition("=")[0] for word in items(container, "args")} <= options
    shown = CliRunner().invoke(main.program, ["--help"])
    assert shown.exit_code == 0
    assert "KUBECONFIG" in shown.output


def test_rights_are_no_wider_than_needed() -> None:
    rules = [rule for each in MANIFESTS for rule in items(each, "rules")]
    assert rules
    for rule in rules:
        verbs, resources = items(rule, "verbs"), items(rule, "resources")
        assert "*" not in [*verbs, *resources, *items(rule, "apiGroups")]
        if "secrets" in resources:
            assert not {"list", "watch"} & set(map(str, verbs))
        if {"pods", "nodes"} & set(map(str, resources)):
            assert not {"update", "patch"} & set(map(str, verbs))
