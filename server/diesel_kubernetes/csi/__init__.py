"""The CSI driver: it publishes datasets as volumes, on kubelet's requests over a socket.

`volumes.py` reads the attributes of a volume, `node.py` decides which mounts start and end,
`targets.py` binds mounts where pods see them, `mounter.py` and `pods.py` start mounts, and
`service.py` speaks gRPC. `VOLUMES.md` describes volumes, each step, and what a crash leaves.
"""
