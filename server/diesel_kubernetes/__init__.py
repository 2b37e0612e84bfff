"""DIESEL-FS in a Kubernetes cluster.

`csi/` is the CSI driver `csi.diesel-fs.dev`: on each node a program, `diesel-csi`, mounts datasets
as volumes of pods. It starts mounts only by running `dlcmd`, so a mount outlives the program that
asked for it. `operator/` is the operator: it makes datasets by Jobs, and runs training jobs
(`operator/OPERATOR.md`). `names.py` has the names in manifests, and `reports.py` the reports of
nodes to the operator.

Start reading at `csi/VOLUMES.md` and `csi/node.py`. `README.md` says how to install it.
"""
