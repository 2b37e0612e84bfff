"""Names that the CSI driver and the operator share. Users' manifests hold them, so they never
change."""

import hashlib

DRIVER = "csi.diesel-fs.dev"

GROUP = "diesel-fs.dev"

POD_NAME = "csi.storage.k8s.io/pod.name"
POD_NAMESPACE = "csi.storage.k8s.io/pod.namespace"
POD_INFO = "csi.storage.k8s.io/"
"""Attributes with this prefix come from kubelet (`podInfoOnMount`)."""

# The attributes that a volume may have (`csi/VOLUMES.md`)
ATTRIBUTES = (
    *"dataset version url user region endpoint follow session memory policy evict seed".split(),
    *"groupSize uid gid umask cacheDir cacheSize cacheLayout orderLogBelow coolDown".split(),
    *"lrfuP lrfuStep task rank world peerTls peersThroughMaster".split(),
)

SECRETS = {
    "user": "DIESEL_USER",
    "key": "DIESEL_KEY",
    "taskKey": "DIESEL_TASK_KEY",
    "redisUser": "DIESEL_REDIS_USER",
    "redisPassword": "DIESEL_REDIS_PASSWORD",
    "redisSentinelPassword": "DIESEL_REDIS_SENTINEL_PASSWORD",
    "AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN": "AWS_SESSION_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME": "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY": "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN": "AZURE_STORAGE_SAS_TOKEN",
}
"""The keys that a volume's Secret may have, and the variables by which a mount gets the values."""

LABEL_NODE = f"{DRIVER}/node"
"""Mount pods, their Secrets and nodes' reports have this label: the node, as `label_value`."""

LABEL_MOUNT = f"{DRIVER}/mount"
"""Mount pods and their Secrets have this label: the mount's name, `KEY-N` (`csi/VOLUMES.md`)."""

_LABEL_CHARS_MAX = 63


def label_value(node: str) -> str:
    """A name that is too long for a label's value becomes a hash."""
    if len(node) <= _LABEL_CHARS_MAX:
        return node
    return hashlib.sha256(node.encode()).hexdigest()[:_LABEL_CHARS_MAX]
