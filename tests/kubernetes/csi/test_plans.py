"""Plans in pods: a training command in a container announces its reads to the volume's mount.

A container is a mount namespace that does not have the plugin's folder of the node, and the command
runs as a user without rights. `dlcmd run` and the mount are real.
"""

import os
import subprocess
from pathlib import Path

import dlcmd
from tests.cli.conftest import program_environment
from tests.own_mounts import own_mounts
from tests.unprivileged_user import USER, as_user, module_path, user_python

from .conftest import MOUNTS_AS_ROOT, put_files
from .plugin import Plugin

pytestmark = MOUNTS_AS_ROOT

CONTAINER = """
mount -t tmpfs hidden "$1"
mount --rbind "$2" /mnt
shift 2
exec "$@"
"""

TRAINING = """
import os
import torch
class Files(torch.utils.data.Dataset):
    def __init__(self):
        self.paths = [os.path.join("/mnt", name) for name in sorted(os.listdir("/mnt"))]
    def __len__(self): return len(self.paths)
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file: return len(file.read())
loader = torch.utils.data.DataLoader(Files(), batch_size=10, shuffle=True)
print(sum(len(batch) for batch in loader), end="")
"""


def in_container(plugin: Plugin, target: Path, home: Path, script: str) -> tuple[str, str]:
    """Run a script by `dlcmd run` in a container with the volume. Returns the output of both."""
    python = user_python()
    paths = os.pathsep.join([module_path(), str(Path(dlcmd.__file__).parents[1])])
    home.mkdir()
    os.chown(home, USER, USER)
    container = ["sh", "-ec", CONTAINER, "sh", str(plugin.state), str(target)]
    words = [*own_mounts(keep=target.parent), *container]
    words += [*as_user(), python, "-m", "dlcmd", "run", "--", python, "-c", script]
    own = {name: text for name, text in program_environment().items() if name[:4] != "XDG_"}
    environment = {**own, "HOME": str(home), "PYTHONPATH": paths}
    ran = subprocess.run(
        words, env=environment, cwd="/", text=True, capture_output=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


def test_a_command_in_a_pod_announces_its_reads(plugin: Plugin, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    put_files(url, {f"{number:03}": b"x" * 100 for number in range(50)}, "many")
    target = tmp_path / "mount"
    plugin.kubelet.publish(target, {"dataset": "many", "url": url})
    try:
        output, reported = in_container(plugin, target, tmp_path / "home", TRAINING)
    finally:
        plugin.kubelet.unpublish(target)
    assert not target.exists()
    assert output == "50"
    assert "announced 1 of 1 epochs, 50 files" in reported
    plugin.wait_until_clean()
