"""The commands and manifests of `deploy/KUBERNETES.md` are right, if that can be tested without
a cluster.
"""

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import cast

import kubernetes_validate
import pytest
import yaml

from diesel_kubernetes.csi.volumes import VolumeLimits, parse_volume
from diesel_kubernetes.names import SECRETS
from diesel_kubernetes.operator.resources import decode_dataset, decode_training
from diesel_kubernetes.operator.specs import parse_dataset, parse_training
from tests.cli.test_program import commands as verbs
from tests.kubernetes.fields import Json, fields, items, text, texts
from tests.kubernetes.operator.made import DEFAULTS
from tests.test_house import TREE

from .manifests import GIVEN, KUBERNETES, container, pod_templates, read, render

PAGE = (TREE / "deploy" / "KUBERNETES.md").read_text(encoding="utf-8")
MINE = "deploy/kubernetes/overlays/mine"
URL = "diesel+tls://diesel-server.diesel.svc:9300"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> list[list[str]]:
    whole = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:kubectl|dlcmd) [^`]*)`", PAGE)
    split = [shlex.split(line, comments=True) for line in [*whole, *inline]]
    return [words for words in split if words]


def kubectl() -> list[list[str]]:
    found = [words[1:] for words in commands() if words[0] == "kubectl"]
    assert len(found) > 25
    return found


def test_applied_and_copied_files_exist() -> None:
    made = {"dataset.yaml", "training.yaml"}
    for words in kubectl():
        for option, path in itertools.pairwise(words):
            if option == "-k":
                assert path == MINE or (TREE / path / "kustomization.yaml").exists(), path
            if option == "-f":
                assert path in made or (TREE / path).exists(), path
    (copied,) = [words for words in commands() if words[0] == "cp"]
    assert (TREE / copied[2]).is_dir()
    assert copied[3] == MINE
    assert {path.name for path in (KUBERNETES / "overlays").iterdir()} == {
        name for name in re.findall(r"^\| `([\w-]+)` \|", PAGE.partition("| overlay |")[2], re.M)
        if (KUBERNETES / "overlays" / name).exists()
    }  # fmt: skip


def test_objects_that_the_page_names_are_in_the_overlays() -> None:
    objects = render(KUBERNETES / "overlays/with-redis")
    there = {(text(each, "kind"), text(each, "metadata", "name")) for each in objects}
    resources = {"datasets", "dataset/pets", "trainingjobs", "pods", "pod", "secret", "namespace"}
    seen = set()
    for words in kubectl():
        plain = [word for word in words if not word.startswith("-")]
        for word in plain:
            if word.startswith("deployment/"):
                name = word.partition("/")[2]
                assert ("Deployment", name) in there, word
                seen.add(name)
        if words[0] == "-n":
            namespace, *plain = plain
            assert ("Namespace", namespace) in there or not namespace.startswith("diesel")
        verb, *rest = plain
        if verb in ("get", "delete", "wait", "describe") and "-k" not in words:
            assert not rest or rest[0] in resources, words
    assert seen == {"diesel-server", "diesel-admin"}


def test_dlcmd_has_the_verbs_and_options() -> None:
    run = [words[words.index("--") + 1 :] for words in kubectl() if "--" in words]
    run += [words for words in commands() if words[0] == "dlcmd" and len(words) > 2]
    run = [words[: words.index(">")] if ">" in words else words for words in run]
    assert len(run) >= 4
    known = verbs()
    for program, verb, *rest in run:
        assert program == "dlcmd"
        if verb not in known:
            verb, rest = f"{verb} {rest[0]}", rest[1:]
        words = [word for word in rest if not word.startswith(">")]
        with known[verb].make_context(verb, words):  # raises for unknown arguments
            pass


def test_the_secrets_are_those_of_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl itself makes them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing, and this system has no package of it")
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    (certificate,) = [block for block in blocks("sh") if "openssl req" in block]
    made = [line for line in "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
            if "create secret" in line]  # fmt: skip
    script = "".join(f"{line} --dry-run=client -o yaml\necho ---\n" for line in made)
    script = f"set -e\n{{ {certificate} }} >&2\necho diesel-key-1:x >trainer.key\n{script}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = {text(each, "metadata", "name"): cast("Json", each)
             for each in yaml.safe_load_all(done.stdout) if each}  # fmt: skip
    assert found.keys() == GIVEN | {"diesel-account"}
    assert fields(found["diesel-tls"], "data").keys() == {"tls.crt", "tls.key"}
    assert fields(found["diesel-account"], "data").keys() <= SECRETS.keys()
    objects = render(KUBERNETES / "overlays/with-redis")
    for one in (container(objects, name) for name in ("server", "admin", "redis")):
        for variable in items(one, "env"):
            reference = fields(variable, "valueFrom", "secretKeyRef")
            if reference and "optional" not in reference:
                assert text(reference, "key") in fields(found[text(reference, "name")], "data")
    tls = [each for each in found.values() if text(each, "type") == "kubernetes.io/tls"]
    assert [text(each, "metadata", "namespace") for each in tls] == ["diesel"]


def test_the_operator_and_the_driver_accept_the_manifests() -> None:
    data, job = (cast("Json", yaml.safe_load(each)) for each in blocks("yaml"))
    spec = parse_dataset(decode_dataset(data), DEFAULTS)
    training = parse_training(decode_training(job))
    assert training.replicas == 4
    name = text(job, "spec", "datasets", 0, "name")
    assert name == text(data, "metadata", "name")
    assert f"dlcmd grant {name} trainer admin" in PAGE
    assert text(data, "spec", "secretName") == "diesel-account"
    assert "diesel+tls://" in " ".join(map(str, spec.put)) or text(data, "spec", "url") == URL
    attributes = {"dataset": name, "url": URL, **texts(job, "spec", "datasets", 0, "options")}
    (account,) = [words for words in kubectl() if "diesel-account" in words]
    keys = [re.split("[= ]", word)[1] for word in account if word.startswith("--from-literal=")]
    assert keys[:2] == ["user", "key"]
    secret = dict.fromkeys(keys, "x") | {"key": f"diesel-key-1:{'A' * 43}="}
    assert parse_volume(attributes, secret, VolumeLimits()).named.startswith(name)
    pod: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    pod["spec"] = fields(job, "spec", "template", "spec")
    kubernetes_validate.validate(pod, "1.27", strict=True)
    service = next(each for each in read(KUBERNETES / "base/server/service.yaml"))
    named = f"{text(service, 'metadata', 'name')}.{text(service, 'metadata', 'namespace')}.svc"
    assert f"//{named}:{items(service, 'spec', 'ports')[0]['port']}" in URL  # type: ignore[index]
    assert f"DNS:{named}" in PAGE


def test_the_image_is_that_of_the_overlays() -> None:
    templates = pod_templates(render(KUBERNETES / "overlays/with-redis"))
    images = {text(each, "spec", "containers", 0, "image") for _, each in templates}
    assert "registry.example/diesel-fs:1" in images
    assert "FROM registry.example/diesel-fs:1\n" in PAGE
    assert "docker build -f deploy/Dockerfile -t registry.example/diesel-fs:1 ." in PAGE
