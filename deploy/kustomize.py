"""As much of kustomize as our manifests use, so that they can be checked where it is not installed: resources, images, patches in JSON 6902 by target.

What it does not know it refuses; tests/unit/test_deploy_kubernetes.py compares it with `kubectl kustomize` where there is one.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "images", "patches"}
HEADER = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def resolve(folder: Path) -> list[Manifest]:
    """Every manifest of a kustomization. Raises ValueError for what is not understood."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(kustomization) - KNOWN
    if unknown or {key: kustomization.get(key) for key in HEADER} != HEADER:
        raise ValueError(f"{folder}: not understood: {sorted(unknown) or 'apiVersion or kind'}")
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        path = folder / resource
        # Anchors make Python share objects; a patch must change one place.
        manifests += (
            resolve(path) if path.is_dir() else [copy.deepcopy(m) for m in yaml.safe_load_all(path.read_text()) if m]
        )
    manifests = [yaml.safe_load(yaml.dump(manifest, Dumper=_NoAliases)) for manifest in manifests]
    for patch in kustomization.get("patches", ()):
        text = patch.get("patch") or (folder / patch["path"]).read_text()
        chosen = [manifest for manifest in manifests if _matches(manifest, patch["target"])]
        if not chosen:
            raise ValueError(f"{folder}: a patch for {patch['target']} changes nothing")
        for manifest in chosen:
            for operation in yaml.safe_load(text):
                _apply(manifest, operation, f"{folder}: {manifest['kind']} {manifest['metadata']['name']}")
    for image in kustomization.get("images", ()):
        for manifest in manifests:
            _retag(manifest, image["name"], f"{image.get('newName', image['name'])}:{image['newTag']}")
    return manifests


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True


def _matches(manifest: Manifest, target: dict[str, str]) -> bool:
    known = {"kind": manifest["kind"], "name": manifest["metadata"]["name"]}
    return all(re.fullmatch(pattern, known[key]) for key, pattern in target.items())


def _apply(manifest: Manifest, operation: dict[str, Any], where: str) -> None:
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = manifest
    for part in path:
        place = place[int(part)] if isinstance(place, list) else place[part]
    value = copy.deepcopy(operation["value"])
    if operation["op"] == "add" and isinstance(place, list) and last == "-":
        place.append(value)
    elif (operation["op"] == "add" and isinstance(place, dict)) or (
        operation["op"] == "replace" and isinstance(place, dict) and last in place
    ):
        place[last] = value
    else:
        raise ValueError(f"{where}: cannot {operation['op']} {operation['path']}")


def _retag(node: Any, name: str, image: str) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "image" and value == name:
                node[key] = image
            else:
                _retag(value, name, image)
    elif isinstance(node, list):
        for value in node:
            _retag(value, name, image)
