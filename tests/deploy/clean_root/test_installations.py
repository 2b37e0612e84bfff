"""Each package, installed as its user would, ends with a dataset that is mounted and read."""

import pytest

from tests.unprivileged_user import needs_root

from .conftest import CleanRoot

pytestmark = [pytest.mark.fuse, needs_root]

APT = "apt-get -qq update >/dev/null; apt-get -qq -y --no-install-recommends install"

SEEN = "seen: the same files"
SERVED = "served: the same files, by the same workers"

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

# Each build of Python has its own OpenSSL, and its own options for it. A supervisor kills a worker
# that hangs after 15 s, hence the pause.
OVER_TLS = rf"""
echo 127.0.0.1 localhost >>/etc/hosts
mkdir /tls
cd /tls
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
    -subj /CN=localhost -addext subjectAltName=DNS:localhost \
    -addext keyUsage=critical,digitalSignature,keyCertSign -keyout key.pem -out cert.pem
dlcmd --url file:///tls/store user add me --admin --key-out me.key
diesel-server --store file:///tls/store --listen 127.0.0.1:0 --workers 2 \
    --tls-cert cert.pem --tls-key key.pem >server.out 2>server.log &
server=$!
until grep -q 'accepts connections' server.out; do kill -0 $server; sleep 1; done
port=$(sed 's/.*://' server.out)
children() {{ cat /proc/$server/task/*/children | xargs -n1 | sort; }}
workers=$(children)
remote() {{
    SSL_CERT_FILE=/tls/cert.pem dlcmd \
        --url diesel+tls://localhost:$port --user me --key-file /tls/me.key "$@"
}}
remote put -q /source pets
[ "$(remote ls pets/train/cat | wc -l)" = 200 ]
remote mount pets /mnt/served
diff -r /source /mnt/served
dlcmd umount /mnt/served
for n in $(seq 100); do
    echo Q | openssl s_client -connect localhost:$port >/dev/null 2>&1
done
remote get -q pets /tls/got
diff -r /source /tls/got
sleep 18
remote ls pets
[ "$(children)" = "$workers" ]
if grep -E 'hangs|again|Traceback' server.log; then exit 1; fi
kill $server
wait $server
cd /
echo {SERVED}
"""


def test_the_debian_package(clean_root: CleanRoot) -> None:
    output = clean_root(rf"""
{APT} /packages/*.deb man-db openssl >/dev/null
{PUT_AND_MOUNT}
{BY_MOUNT}
{OVER_TLS}
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
    assert SERVED in output


@pytest.mark.parametrize("package", ["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def test_the_packages_of_pip(clean_root: CleanRoot, package: str) -> None:
    output = clean_root(rf"""
{APT} python3-venv fuse3 man-db openssl >/dev/null
python3 -m venv /venv
/venv/bin/pip --quiet install /packages/{package}
export PATH=/venv/bin:$PATH
{PUT_AND_MOUNT}
ln -s /venv/bin/mount.diesel /venv/bin/umount.diesel /usr/sbin
{BY_MOUNT}
{OVER_TLS}
man -w dlcmd-put
ls /venv/share/bash-completion/completions/dlcmd
""")
    assert SEEN in output
    assert SERVED in output
