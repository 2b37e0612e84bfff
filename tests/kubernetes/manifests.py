"""Reads manifests from folders, and checks objects against Kubernetes' published schemas."""

from collections.abc import Iterable
from pathlib import Path

import kubernetes_validate

from tests.deploy.manifests import read
from tests.kubernetes.fields import Json

VERSIONS = ["1.27", kubernetes_validate.latest_version()]
"""The oldest release that the manifests are for, and the newest one with published schemas."""


def objects(*folders: Path) -> list[Json]:
    """The objects in all files of some folders, without those for kustomize."""
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return [each for path in files if path.name != "kustomization.yaml" for each in read(path)]


def check_schemas(found: Iterable[Json]) -> None:
    """Assert that each object has its published schema, in the oldest and in the newest release."""
    for each in found:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)
