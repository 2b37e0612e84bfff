"""Reads the manifests in folders, and holds objects against the published schemas of Kubernetes."""

from collections.abc import Iterable
from pathlib import Path

import kubernetes_validate

from tests.deploy.manifests import read
from tests.kubernetes.fields import Json

VERSIONS = ["1.27", kubernetes_validate.latest_version()]
"""The oldest release that the manifests are for, and the newest one with published schemas."""


def objects(*folders: Path) -> list[Json]:
    """The objects in all files of some folders, but for what kustomize reads."""
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return [each for path in files if path.name != "kustomization.yaml" for each in read(path)]


def check_schemas(found: Iterable[Json]) -> None:
    """Each object has its published schema, in the oldest release and in the newest one."""
    for each in found:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)
