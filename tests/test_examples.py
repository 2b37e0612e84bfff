"""Every block of code in the pages works as written.

Blocks run in worlds of their own: a home, `/mnt`, and a network with nothing on `localhost` but the
servers that the blocks start. `BEFORE` has the steps that a reader has done before a block, and
`INSTEAD` replaces words that stand for something of the reader's (a host, 90 epochs). Blocks that
run elsewhere, or need things that no test can have, are in `ELSEWHERE`, with the reason.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .cli.conftest import program_environment
from .own_mounts import own_mounts
from .test_house import FILES, TREE

ELSEWHERE = {
    "README.md sh 1": "tests/test_first_minutes.py",
    "diesel_fs/client/README.md python 1": "tests/test_first_minutes.py",
    "diesel_fs/torch/README.md python 5": "tests/torch/clients/fsspec_reads.py",
    "CONTRIBUTING.md python 1": "tests/cli/test_program.py",
    "CONTRIBUTING.md python 2": "tests/cli/test_program.py",
    "CONTRIBUTING.md sh 1": "targets of make: tests/test_documents.py",
    "CONTRIBUTING.md sh 2": "targets of make: tests/test_documents.py",
    "tests/kubernetes/README.md sh 1": "targets of make: tests/test_documents.py",
    "tests/torch/clients/README.md sh 1": "targets of make: tests/test_documents.py",
    "deploy/README.md sh 1": "settings of the server: tests/deploy/test_systemd.py",
    "deploy/README.md sh 2": "a bucket and a Redis at other hosts: tests/cli/test_shared_stores.py",
    "deploy/README.md sh 3": "settings of a mount: tests/deploy/test_systemd.py",
    "deploy/README.md sh 4": "settings of a mount: tests/deploy/test_systemd.py",
    "deploy/README.md sh 5": "packages of the system: deploy/prepare.sh does the same",
    "deploy/README.md sh 6": "a container engine, which is not here: tests/deploy/test_deploy.py",
    "server/diesel_kubernetes/README.md sh 1": "a cluster: tests/kubernetes/csi/test_manifests.py",
    "server/diesel_kubernetes/README.md yaml 1": "tests/kubernetes/csi/test_manifests.py",
    "server/diesel_kubernetes/operator/OPERATOR.md sh 1": "a cluster: tests/kubernetes/operator",
}

OWN_TEST = "deploy/KUBERNETES.md"
"""tests/deploy/test_kubernetes_page.py and tests/image run its commands."""

FILES_OF_THE_READER = {
    "put.py": """
import sys
from pathlib import Path
from PIL import Image
for kind in ("cat", "dog"):
    for number in range(1, 11):
        place = Path(f"{sys.argv[1]}/train/{kind}/{number}.jpg")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, len(kind))).save(place)
""",
    "train.py": """
import os, sys
import deploy.torchvision_operators
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
if "--list" in sys.argv:
    at, names = sys.argv[2], open(sys.argv[4]).read().splitlines()
    assert len(names) == 20
    for name in names: open(os.path.join(at, name), "rb").read()
""",
}
BEFORE = {
    "start": {"README.md python 1": "put pets"},
    "commands": {
        "diesel_fs/forecast/README.md sh 1": "put pets",
        "diesel_fs/forecast/README.md sh 2": "",
    },
    "python": {
        "diesel_fs/client/README.md python 2": "put pets",
        "diesel_fs/client/README.md python 3": "flat pets",
    },
    "mount": {"diesel_fs/mounts/README.md sh 1": "put pets"},
    "task": {
        "diesel_fs/peers/README.md sh 1": """
            redis; export DIESEL_URL="file://$HOME/store?meta=redis://192.0.2.1"
            put pets; flat pets""",
        "diesel_fs/peers/README.md python 1": "",
    },
    "torch": {
        "diesel_fs/torch/README.md sh 1": "put imagenet",
        "diesel_fs/torch/README.md python 1": "",
        "diesel_fs/torch/README.md python 2": "",
        "diesel_fs/torch/README.md python 3": """
            put pets; put speech
            printf 'path,target\\ntrain/cat/1.jpg,cat\\ntrain/dog/2.jpg,dog\\n' >labels.csv
            for name in pets speech; do dlcmd put --manifest labels.csv $name $name; done
            dlcmd mount pets /mnt/pets""",
        "diesel_fs/torch/README.md python 4": "",
        "diesel_fs/torch/README.md sh 2": "dlcmd umount /mnt/imagenet",
    },
    "server": {
        "server/diesel_server/README.md sh 1": "redis",
        "server/diesel_server/README.md sh 2": """
            kill $(cat server.pid); redis; rm -rf *.key server.log data""",
        "deploy/README.md sh 7": """
            dlcmd --user root --key-file root.key user export accounts.jsonl
            redis""",
    },
}
"""The worlds, their blocks in order, and the code before each: functions of `WORLD` and more."""

PYTHON_BEFORE = {
    "diesel_fs/client/README.md python 2": "import diesel_fs\nds = diesel_fs.connect('pets')\n",
    "diesel_fs/client/README.md python 3": "import diesel_fs\n",
    "diesel_fs/peers/README.md python 1": "import diesel_fs\n",
    "diesel_fs/torch/README.md python 2": "transform = lambda image: 0.5\n",
    "diesel_fs/torch/README.md python 3": """
from diesel_fs.torch import DieselDataset, ManifestFolder
transform = None
""",
    "diesel_fs/torch/README.md python 4": """
import deploy.torchvision_operators, torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor as transform_class
transform = transform_class()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
""",
}

INSTEAD = {
    "range(90)": "range(2)",
    "num_workers=8": "num_workers=1",
    ', url="diesel://server:9300"': "",
    "file:///data": "file://$HOME/data",
    "dlcmd mount --task night-run --rank": "dlcmd umount /mnt/pets\ndlcmd mount --task n2 --rank",
    "--memory 8G": "--memory 1G",
    "--memory 32G": "--memory 1G",
    "redis://localhost &": "redis://localhost",  # the function below waits for it, too
}

WORLD = r"""
set -eu
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 192.0.2.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
ip route add default dev eth0
mount -t tmpfs none /mnt
cd "$HOME"
flat() { cp -r "$1/train/cat" "$1"; dlcmd put "$1" "$1"; }
put() { python put.py "$1"; dlcmd put "$1" "$1"; }
redis() {
    redis-cli shutdown nosave 2>/dev/null || true
    redis-server --port 6379 --bind 127.0.0.1 192.0.2.1 --protected-mode no --save "" \
        --daemonize yes >redis.log
    until redis-cli ping >/dev/null 2>&1; do sleep 0.1; done
}
srun() { SLURM_PROCID=0 SLURM_NTASKS=1 "$@"; }
diesel-server() {
    command diesel-server "$@" >>server.log 2>&1 &
    echo $! >server.pid
    until grep -q accepts server.log; do sleep 0.1; done
}
end() {
    code=$?
    for place in $(ls -d /mnt/*/ 2>/dev/null); do dlcmd umount --force "$place" || true; done
    kill $(cat server.pid 2>/dev/null) 2>/dev/null || true
    redis-cli shutdown nosave 2>/dev/null || true
    exit $code
}
trap end EXIT
"""


def blocks() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(FILES):
        if path.suffix == ".md":
            for language, body in re.findall(
                r"^ *```(sh|python|yaml)\n(.*?)^ *```",
                path.read_text(encoding="utf-8"),
                re.M | re.S,
            ):
                name = f"{path.relative_to(TREE)} {language}"
                number = 1 + sum(each.startswith(f"{name} ") for each in found)
                found[f"{name} {number}"] = body
    return {name: body for name, body in found.items() if not name.startswith(OWN_TEST)}


BLOCKS = blocks()


def commands(name: str, before: str) -> str:
    body = BLOCKS[name]
    for placeholder, meant in INSTEAD.items():
        body = body.replace(placeholder, meant)
    if name.split()[1] == "python":
        body = f"python - <<'END'\n{PYTHON_BEFORE.get(name, '')}\n{body}END\n"
    return f"{before}\n{body}"


def test_each_block_is_run_or_has_a_reason_why_not() -> None:
    assert sorted(BLOCKS) == sorted(
        [*ELSEWHERE, *(name for world in BEFORE.values() for name in world)]
    )


@pytest.mark.deep
@pytest.mark.fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes the world of a page")
@pytest.mark.parametrize("world", BEFORE)
def test_the_blocks_of_a_world_run(world: str, tmp_path: Path) -> None:
    for name, text in FILES_OF_THE_READER.items():
        (tmp_path / name).write_text(text)
    script = WORLD + "".join(commands(*each) for each in BEFORE[world].items())
    environment = {
        name: value
        for name, value in program_environment().items()
        if not name.startswith(("XDG_", "DIESEL_"))
    }
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment |= {"HOME": str(tmp_path), "PATH": programs}
    done = subprocess.run(
        [*own_mounts("--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
         "bash", "-c", script],
        env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
