"""Reads the overlays of `deploy/kubernetes` as kubectl renders them."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import yaml

from tests.kubernetes.fields import Json, fields, items, text
from tests.test_house import TREE

KUBERNETES = TREE / "deploy" / "kubernetes"
BASES = sorted(path.parent for path in (KUBERNETES / "base").glob("*/kustomization.yaml"))
OVERLAYS = sorted(path.parent for path in (KUBERNETES / "overlays").glob("*/kustomization.yaml"))

GIVEN = {"diesel-store", "diesel-tls", "diesel-redis"}
"""The Secrets that an administrator makes; `deploy/KUBERNETES.md` describes how."""


def read(path: Path) -> list[Json]:
    return [cast("Json", each) for each in yaml.safe_load_all(path.read_text()) if each]


@cache
def render(folder: Path) -> list[Json]:
    """The test is skipped if there is no kubectl."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is missing, and this system has no package of it")
    done = subprocess.run(
        [program, "kustomize", folder], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [cast("Json", each) for each in yaml.safe_load_all(done.stdout) if each]


def key(each: Json) -> tuple[str, str, str]:
    metadata = fields(each, "metadata")
    return text(each, "kind"), text(metadata, "namespace"), text(metadata, "name")


def pod_templates(objects: list[Json]) -> Iterator[tuple[str, Json]]:
    for each in objects:
        if fields(each, "spec", "template", "spec"):
            yield key(each)[1], fields(each, "spec", "template")


def containers(template: Json) -> list[Json]:
    spec = fields(template, "spec")
    assert not items(spec, "initContainers")
    return [cast("Json", each) for each in items(spec, "containers")]


def container(objects: list[Json], name: str) -> Json:
    found = [one for _, each in pod_templates(objects) for one in containers(each)]
    (chosen,) = [one for one in found if one["name"] == name]
    return chosen


def environment(
    objects: list[Json], of: Json, secrets: dict[str, dict[str, str]]
) -> dict[str, str]:
    """Compute the variables as kubelet would. One that is made from a field of the pod has the
    field's name as its value."""
    config = {key(each)[2]: fields(each, "data") for each in objects if each["kind"] == "ConfigMap"}
    made: dict[str, str] = {}
    for source in items(of, "envFrom"):
        if name := text(source, "configMapRef", "name"):
            made |= {one: str(value) for one, value in config[name].items()}
        else:
            made |= secrets[text(source, "secretRef", "name")]
    for variable in items(of, "env"):
        name = text(variable, "name")
        if reference := fields(variable, "valueFrom", "secretKeyRef"):
            secret = secrets.get(text(reference, "name"), {})
            if text(reference, "key") in secret:
                made[name] = secret[text(reference, "key")]
            else:
                assert reference.get("optional") is True, name
        elif field := text(variable, "valueFrom", "fieldRef", "fieldPath"):
            made[name] = field
        else:
            made[name] = text(variable, "value")
            for known, value in made.items():
                made[name] = made[name].replace(f"$({known})", value)
    return made
