"""Each package, installed as its user would, ends with a dataset that is mounted and read."""

import pytest

from tests.unprivileged_user import needs_root

from .conftest import CleanRoot

pytestmark = [pytest.mark.fuse, needs_root]

APT = "apt-get -qq update >/dev/null; apt-get -qq -y --no-install-recommends install"

SEEN = "seen: the same files"

PUT_AND_MOUNT = rf"""
cd /
mkdir -p /source/train/cat
for n in $(seq 200); do head -c 5000 /dev/urandom >/source/train/cat/$n.jpg; done
dlcmd put -q /source pets
dlcmd mount pets /mnt/pets
diff -r /source /mnt/pets
dlcmd stats /mnt/pets >/dev/null
dlcmd umount /mnt/pets
dlcmd verify -q pets
diesel-server --version
echo {SEEN}
"""

BY_MOUNT = r"""
mkdir /mnt/of-mount
mount -t diesel pets /mnt/of-mount -o url=file:///root/.local/share/diesel
diff -r /source /mnt/of-mount
umount /mnt/of-mount
echo 'pets /mnt/of-mount diesel url=file:///root/.local/share/diesel,allow-other 0 0' >>/etc/fstab
mount -a
diff -r /source /mnt/of-mount
umount /mnt/of-mount
[ -z "$(ls /mnt/of-mount)" ]
"""


def test_the_debian_package(clean_root: CleanRoot) -> None:
    """With its dependencies from Debian, man pages, completions, units and mount.diesel."""
    output = clean_root(rf"""
{APT} /packages/*.deb man-db >/dev/null
{PUT_AND_MOUNT}
{BY_MOUNT}
dpkg --verify diesel-fs
for page in dlcmd dlcmd-put diesel-server mount.diesel umount.diesel; do man -w $page; done
man dlcmd-mount | grep -q allow-other
ls /usr/share/bash-completion/completions/dlcmd /usr/share/zsh/vendor-completions/_dlcmd \
    /usr/share/fish/vendor_completions.d/dlcmd.fish /usr/lib/systemd/system/diesel-mount@.service
[ $(stat -c %a /etc/diesel/mounts) = 700 ]
dlcmd --url file:///root/.local/share/diesel mount --session pyfuse3 pets /mnt/pets
diff -r /source /mnt/pets
dlcmd umount /mnt/pets
apt-get -qq -y purge diesel-fs >/dev/null
[ ! -e /opt/diesel-fs ] && [ ! -e /usr/sbin/mount.diesel ] && [ ! -e /etc/diesel ]
""")
    assert SEEN in output


@pytest.mark.parametrize("package", ["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def test_what_pip_installs(clean_root: CleanRoot, package: str) -> None:
    output = clean_root(rf"""
{APT} python3-venv fuse3 man-db >/dev/null
python3 -m venv /venv
/venv/bin/pip --quiet install /packages/{package}
export PATH=/venv/bin:$PATH
{PUT_AND_MOUNT}
ln -s /venv/bin/mount.diesel /venv/bin/umount.diesel /usr/sbin
{BY_MOUNT}
man -w dlcmd-put
ls /venv/share/bash-completion/completions/dlcmd
""")
    assert SEEN in output
