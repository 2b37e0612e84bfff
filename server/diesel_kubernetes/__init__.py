"""DIESEL-FS in a Kubernetes cluster.

`csi/` is the CSI driver `csi.diesel-fs.dev`: on each node a program, `diesel-csi`, mounts datasets
as volumes of pods, always by `dlcmd`, so that a mount outlives it. `operator/` makes datasets by
Jobs, and runs training jobs (`operator/OPERATOR.md`). `names.py` has the names in manifests, and
`reports.py` the reports of nodes to the operator.

Start at `csi/VOLUMES.md` and `csi/node.py`.
"""
