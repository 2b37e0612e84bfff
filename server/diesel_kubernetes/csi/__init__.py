"""The CSI driver: on requests of kubelet over a socket, it publishes datasets as volumes.

`volumes.py` reads the attributes of a volume, `node.py` decides which mounts start and end,
`targets.py` binds mounts where pods see them, `mounter.py` and `pods.py` start mounts, and
`service.py` speaks gRPC. `VOLUMES.md` describes volumes, each step, and what a crash leaves. It
also explains the words *plugin* (the process `diesel-csi`, one on each node), *publish*, *target*
(the path at which a pod sees a volume) and *bind*.
"""
