"""The CSI driver: it publishes datasets as volumes, as kubelet asks for them over a socket.

`volumes.py` reads what a volume names, `node.py` decides what to mount and to end, `targets.py`
binds mounts where pods see them, `mounter.py` and `pods.py` start mounts, and `service.py` speaks
gRPC. `VOLUMES.md` describes volumes, each step, and what a crash leaves.
"""
