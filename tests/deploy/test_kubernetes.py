"""The overlays of `deploy/kubernetes`, as an administrator's kubectl renders them.

Their objects have the published schemas, name only existing objects, and fit the programs that they
start. `tests/kubernetes/` tests the CSI driver and the operator.
"""

import re
import shutil
from pathlib import Path

import click
import kubernetes_validate
import pytest

from diesel_fs.settings import parse_size
from diesel_kubernetes.csi import main as csi
from diesel_kubernetes.operator import cluster, controller, handlers
from diesel_kubernetes.operator import main as operator
from diesel_server.main import program as server
from diesel_server.options import checked
from tests.kubernetes.fields import Json, at, fields, items, text, texts
from tests.rows import each_row

from .manifests import (
    BASES,
    GIVEN,
    KUBERNETES,
    OVERLAYS,
    container,
    containers,
    environment,
    key,
    pod_templates,
    read,
    render,
)

OLDEST = "1.27"
OURS = {"server", "admin", "plugin", "operator"}
"""The containers that run the project's image."""

EACH_OVERLAY = each_row("overlay", OVERLAYS)
SECRETS = {
    "diesel-store": {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "key"},
    "diesel-redis": {"password": "pass"},
}

OLD_KUSTOMIZE = {
    "apiVersion", "kind", "bases", "resources", "images", "configMapGenerator",
    "patchesStrategicMerge",
}  # fmt: skip
"""The fields that kustomize 2.0.3, which is part of kubectl 1.20, and the newest one know."""


@each_row("folder", [*BASES, *OVERLAYS])
def test_an_old_kubectl_knows_all_fields_of_the_kustomizations(folder: Path) -> None:
    """Folders are `bases` and files are `resources`. Beside images no schema has the word
    `containers`: old kustomize would take it for the containers of a pod."""
    (kustomization,) = read(folder / "kustomization.yaml")
    assert kustomization.keys() <= OLD_KUSTOMIZE
    assert all((folder / str(each)).is_dir() for each in items(kustomization, "bases"))
    listed = {str(each) for each in items(kustomization, "resources")}
    listed |= {str(each) for each in items(kustomization, "patchesStrategicMerge")}
    assert listed == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    bases = [(folder / str(each)).resolve() for each in items(kustomization, "bases")]
    if "images" in kustomization:
        assert KUBERNETES / "base/definitions" not in bases


def test_each_overlay_has_the_parts_that_it_names() -> None:
    rendered = {path.name: {key(each)[2] for each in render(path)} for path in OVERLAYS}
    assert rendered.keys() == {"with-redis", "redis-given", "gpu-nodes"}
    for names in rendered.values():
        assert names >= {"diesel-server", "diesel-admin", "diesel-csi", "diesel-operator"}
        assert "diesel-operator-secrets" not in names, "the server has TLS"
    assert "diesel-redis" in rendered["with-redis"] & rendered["gpu-nodes"]
    assert "diesel-redis" not in rendered["redis-given"]


@EACH_OVERLAY
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_objects_have_the_published_schemas(overlay: Path, version: str) -> None:
    objects = render(overlay)
    assert len(objects) > 15
    assert len({key(each) for each in objects}) == len(objects)
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


@EACH_OVERLAY
def test_the_image_is_named_once_and_reaches_every_container(overlay: Path, tmp_path: Path) -> None:
    """The test follows the page's steps, in an administrator's copy of an overlay beside the
    others."""
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    for path in copy.rglob("*.yaml"):
        if "newName" in (words := path.read_text()):
            assert words.count("registry.example/diesel-fs") == 1
            words = words.replace("registry.example/diesel-fs", "registry.test:5000/team/fs")
            path.write_text(words.replace('newTag: "1"', 'newTag: "7.1"'))
    found = [each for _, template in pod_templates(render(copy / "overlays" / overlay.name))
             for each in containers(template)]  # fmt: skip
    images = {text(each, "name"): text(each, "image") for each in found}
    assert {name for name, image in images.items() if "registry.test" in image} == OURS
    assert {images[name] for name in OURS} == {"registry.test:5000/team/fs:7.1"}
    for name in images.keys() - OURS:
        assert re.search(r":v?\d+\.\d+\.\d+", images[name]), "images of others have a release"
    for each in found:  # nor by a variable: these programs read it from their own pods
        assert not [name for name in items(each, "env") if text(name, "name").endswith("_IMAGE")]
    pods = {"plugin": "DIESEL_CSI_POD", "operator": "DIESEL_OPERATOR_POD"}
    assert {csi.CONTAINER, operator.CONTAINER} == pods.keys()
    for name, variable in pods.items():
        (one,) = [each for each in found if each["name"] == name]
        (pod,) = [each for each in items(one, "env") if text(each, "name") == variable]
        assert text(pod, "valueFrom", "fieldRef", "fieldPath") == "metadata.name"


@EACH_OVERLAY
def test_the_server_accepts_its_settings(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own parser reads them."""
    objects = render(overlay)
    one = container(objects, "server")
    made = environment(objects, one, SECRETS)
    known = {f"DIESEL_SERVER_{each.name.upper()}" for each in server.params if each.name}
    assert {name for name in made if name.startswith("DIESEL_SERVER_")} <= known
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    assert (items(one, "command"), items(one, "args")) == (["diesel-server"], [])
    with server.make_context("diesel-server", []) as context:
        given = {name: value for name, value in context.params.items() if name != "config"}
    options, warnings = checked(**given)
    assert warnings == []
    ports = {text(each, "name"): at(each, "containerPort") for each in items(one, "ports")}
    assert options.metrics is not None
    assert (options.listen.port, options.metrics.port) == (ports["diesel"], ports["metrics"])
    assert options.listen.host == options.metrics.host == "0.0.0.0"  # noqa: S104
    assert options.url.scheme == "s3"
    assert options.url.meta.startswith(("redis://", "rediss://"))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert fields(one, probe, "httpGet") == {"path": "/healthz", "port": "metrics"}
    (template,) = [each for _, each in pod_templates(objects) if one in containers(each)]
    mounted = {
        text(each, "name"): Path(text(each, "mountPath")) for each in items(one, "volumeMounts")
    }
    volumes = {text(each, "name"): fields(each) for each in items(template, "spec", "volumes")}
    assert mounted.keys() == volumes.keys()
    assert options.certificate == mounted["tls"] / "tls.crt"
    assert options.key == mounted["tls"] / "tls.key"
    assert options.cache is not None
    assert options.cache.parent == mounted["cache"], "a folder of the server's own below it"
    limit = text(volumes["cache"], "emptyDir", "sizeLimit")
    assert parse_size(limit.replace("Gi", "G")) > options.cache_bytes
    assert text(one, "resources", "requests", "ephemeral-storage") == limit
    assert Path(made["HOME"]) == mounted["tmp"]


@EACH_OVERLAY
def test_administrators_get_the_servers_store_and_redis(overlay: Path) -> None:
    objects = render(overlay)
    made = environment(objects, container(objects, "admin"), SECRETS)
    of_server = environment(objects, container(objects, "server"), SECRETS)
    store, meta = of_server["DIESEL_SERVER_STORE"], of_server["DIESEL_SERVER_META"]
    assert made.pop("DIESEL_URL") == f"{store}?meta={meta}"
    assert made == of_server
    (admin,) = [each for each in objects if key(each)[2] == "diesel-admin"]
    assert at(admin, "spec", "replicas") == 0


@EACH_OVERLAY
@each_row(
    ("name", "program", "prefix"),
    [("plugin", csi.program, csi.PREFIX), ("operator", operator.program, operator.PREFIX)],
)
def test_the_driver_and_the_operator_accept_their_settings(
    overlay: Path, name: str, program: click.Command, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(overlay)
    one = container(objects, name)
    made = environment(objects, one, SECRETS)
    assert made.keys() <= {f"{prefix}_{each.name.upper()}" for each in program.params if each.name}
    for variable, value in made.items():
        monkeypatch.setenv(variable, value)
    given = [str(each) for each in items(one, "args")]
    with program.make_context(name, given) as context:
        assert context.params["pod"] == "metadata.name"


@EACH_OVERLAY
def test_no_secret_is_in_an_object(overlay: Path) -> None:
    objects = render(overlay)
    assert [key(each) for each in objects if each["kind"] == "Secret"] == []
    words = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|[a-z]+://[^/?]*@", re.IGNORECASE)
    for each in objects:
        if each["kind"] == "ConfigMap":
            for name, value in texts(each, "data").items():
                assert not words.search(f"{name}={value}"), name
    for _, template in pod_templates(objects):
        for one in containers(template):
            for variable in items(one, "env"):
                if words.search(text(variable, "name")):
                    assert fields(variable, "valueFrom", "secretKeyRef")


def test_secrets_of_the_examples_are_placeholders() -> None:
    files = (KUBERNETES / "examples").rglob("*.yaml")
    found = [each for path in files for each in read(path) if each["kind"] == "Secret"]
    assert found
    for each in found:
        assert not fields(each, "data")
        assert "REPLACE" in texts(each, "stringData")["key"]


def references(template: Json) -> set[tuple[str, str]]:
    spec = fields(template, "spec")
    found = {("ServiceAccount", text(spec, "serviceAccountName"))}
    for volume in items(spec, "volumes"):
        found.add(("Secret", text(volume, "secret", "secretName")))
        found.add(("ConfigMap", text(volume, "configMap", "name")))
    for one in containers(template):
        values = [at(each, "valueFrom") for each in items(one, "env")]
        for source in [*items(one, "envFrom"), *values]:
            found.add(("Secret", text(source, "secretRef", "name")))
            found.add(("Secret", text(source, "secretKeyRef", "name")))
            found.add(("ConfigMap", text(source, "configMapRef", "name")))
    return {(kind, name) for kind, name in found if name}


@EACH_OVERLAY
def test_objects_name_only_existing_or_given_objects(overlay: Path) -> None:
    objects = render(overlay)
    there = {(kind, name): namespace for kind, namespace, name in map(key, objects)}
    namespaces = {name for kind, _, name in map(key, objects) if kind == "Namespace"}
    assert {namespace for _, namespace, _ in map(key, objects)} - {""} <= namespaces
    for namespace, template in pod_templates(objects):
        for kind, name in references(template):
            if kind == "Secret":
                assert name in GIVEN
                assert namespace == "diesel"
            else:
                assert there[kind, name] == namespace
    for each in objects:
        for subject in items(each, "subjects"):
            account = there[text(subject, "kind"), text(subject, "name")]
            assert account == text(subject, "namespace")
        if "roleRef" in each:
            assert (text(each, "roleRef", "kind"), text(each, "roleRef", "name")) in there


@EACH_OVERLAY
def test_selectors_find_their_pods(overlay: Path) -> None:
    objects = render(overlay)
    labels = {(namespace, *fields(each, "metadata", "labels").items()): each
              for namespace, each in pod_templates(objects)}  # fmt: skip
    checked_kinds = set()
    for each in objects:
        kind, namespace, _ = key(each)
        selectors = [fields(each, "spec", "selector")]
        if kind == "NetworkPolicy":
            peers = items(each, "spec", "ingress", 0, "from")
            selectors = [fields(one, "podSelector") for one in [fields(each, "spec"), *peers]]
        for selector in filter(None, selectors):
            wanted = fields(selector, "matchLabels") or selector
            template = labels[namespace, *wanted.items()]
            checked_kinds.add(kind)
            if kind == "Service":
                ports = [port for one in containers(template) for port in items(one, "ports")]
                targets = {text(port, "targetPort") for port in items(each, "spec", "ports")}
                assert targets <= {text(port, "name") for port in ports}
    assert checked_kinds >= {"Service", "Deployment", "DaemonSet", "PodDisruptionBudget"}
    settings = environment(objects, container(objects, "server"), SECRETS)
    if "diesel-redis.diesel.svc:6379" in settings["DIESEL_SERVER_META"]:
        assert ("Service", "diesel", "diesel-redis") in map(key, objects)


@EACH_OVERLAY
def test_pods_are_as_restricted_as_their_namespace_requires(overlay: Path) -> None:
    """Only the CSI plugin, which mounts, is privileged, and it has a namespace of its own."""
    objects = render(overlay)
    names = {"diesel": "restricted", "diesel-system": "privileged"}
    label = "pod-security.kubernetes.io/enforce"
    for each in objects:
        if each["kind"] == "Namespace":
            assert texts(each, "metadata", "labels")[label] == names[key(each)[2]]
    for namespace, template in pod_templates(objects):
        spec = fields(template, "spec")
        restricted = []
        for one in containers(template):
            if at(one, "securityContext", "privileged"):
                assert one["name"] == "plugin"
            else:
                restricted.append(one)
        if namespace == "diesel":
            assert at(spec, "automountServiceAccountToken") is False
            assert at(spec, "securityContext", "seccompProfile", "type") == "RuntimeDefault"
            assert at(spec, "securityContext", "runAsNonRoot") is True
            assert all("hostPath" not in fields(one) for one in items(spec, "volumes"))
        for one in restricted:
            context = fields(one, "securityContext")
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            if namespace == "diesel":
                assert items(context, "capabilities", "drop") == ["ALL"]
            assert fields(one, "resources", "requests").keys() >= {"cpu", "memory"}


def test_a_patch_changes_the_driver_for_gpu_nodes_alone() -> None:
    before, after = (
        {key(each): each for each in render(KUBERNETES / "overlays" / name)}
        for name in ("with-redis", "gpu-nodes")
    )
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {("DaemonSet", "diesel-system", "diesel-csi")}
    spec = fields(after["DaemonSet", "diesel-system", "diesel-csi"], "spec", "template", "spec")
    assert at(spec, "nodeSelector", "nvidia.com/gpu.present") == "true"
    assert all(text(each, "key") for each in items(spec, "tolerations")), "not every taint"
    assert len(items(spec, "containers")) == 3
    (plugin,) = [each for each in items(spec, "containers") if text(each, "name") == "plugin"]
    assert {"DIESEL_CSI_POD", "DIESEL_CSI_CACHE_ROOT"} <= {
        text(each, "name") for each in items(plugin, "env")
    }


def rights(folder: str) -> set[tuple[str, str]]:
    found = set()
    for path in (KUBERNETES / "base" / folder).glob("*.yaml"):
        for each in read(path):
            for rule in items(each, "rules"):
                assert fields(rule).keys() == {"apiGroups", "resources", "verbs"}
                for resource in items(rule, "resources"):
                    found |= {(str(resource), str(verb)) for verb in items(rule, "verbs")}
    return found


KINDS = "Pods|ConfigMaps|Secrets|Services|Jobs|Datasets|TrainingJobs"


def test_the_operator_has_exactly_the_rights_that_its_code_uses() -> None:
    """Each call of `Cluster` is a right, by the kind that it names."""
    source = Path(controller.__file__).read_text()
    used = {("nodes", "list")} if "_cluster.nodes()" in source else set()
    for method, verb in (("get", "get"), ("find", "list"), ("delete", "delete")):
        for kind in re.findall(rf"_cluster\.{method}\(\s*({KINDS}|kind)\b", source):
            # `kind` is one of the two that a TrainingJob makes by name
            named = [kind] if kind != "kind" else ["Pods", "Services"]
            used |= {(one.lower(), verb) for one in named}
    assert "kind = Pods if" in source
    used |= {(f"{kind.lower()}s", "create") for kind in cluster._KINDS}
    used |= {(f"{kind.__name__.lower()}/status", "update") for kind in cluster._STATUS}
    for kind in re.findall(rf"_cluster\.set_finalizers\(\s*({KINDS})\b", source):
        used.add((kind.lower(), "patch"))
    watched = re.findall(
        r'^    watch\([^,]+, [^,]+, ([\w"]+)\)', Path(handlers.__file__).read_text(), re.MULTILINE
    )
    names = {"DATASETS": controller.DATASETS, "TRAINING_JOBS": controller.TRAINING_JOBS}
    for each in watched:
        plural = names.get(each, each.strip('"'))
        used |= {(plural, "list"), (plural, "watch")}
    assert len(watched) == 4
    # An owner with blockOwnerDeletion needs this if the cluster enforces it
    used |= {("datasets/finalizers", "update"), ("trainingjobs/finalizers", "update")}
    used.add(("pods", "get"))  # its own image, and the pods that it has seen
    assert rights("operator") | rights("operator-secrets") == used
    assert {resource for resource, _ in rights("operator-secrets")} == {"secrets"}


def test_the_operator_reads_config_maps_of_the_drivers_namespace_alone() -> None:
    roles = [each for path in (KUBERNETES / "base/operator").glob("*.yaml") for each in read(path)]
    (role,) = [each for each in roles for rule in items(each, "rules")
               if "configmaps" in items(rule, "resources")]  # fmt: skip
    assert key(role) == ("Role", "diesel-system", "diesel-operator-reports")
    assert len(items(role, "rules")) == 1
    with operator.program.make_context("diesel-operator", []) as context:
        assert context.params["driver_namespace"] == "diesel-system"


def test_a_namespace_of_its_own_keeps_the_servers_secrets_from_the_nodes() -> None:
    """The CSI plugin, which runs on every node, may list Secrets of its namespace."""
    assert rights("server") == rights("redis") == set()
    objects = render(KUBERNETES / "overlays/with-redis")
    roles = [key(each) for each in objects if each["kind"] == "Role"]
    assert {namespace for _, namespace, _ in roles} == {"diesel-system"}
    used = {namespace for namespace, each in pod_templates(objects)
            for kind, _ in references(each) if kind == "Secret"}  # fmt: skip
    assert used == {"diesel"}
