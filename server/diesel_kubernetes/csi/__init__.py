"""The CSI driver: on requests of kubelet over a socket, it publishes datasets as volumes.

`VOLUMES.md` describes volumes, each step, and what a crash leaves. It also explains the words
*plugin* (the process `diesel-csi`, one on each node), *publish*, *target* (the path at which a pod
sees a volume) and *bind*. Start at `node.py`, which decides which mounts start and end.
`mounter.py` and `pods.py` start them, and `targets.py` binds them where pods see them.
"""
