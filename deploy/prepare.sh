#!/bin/sh
# Installs the system packages that are missing, and makes .venv. It uses apt-get, as root or through
# sudo; if it cannot, it prints the names of the packages.
#
#   deploy/prepare.sh install|test|s3|kubernetes|image|packages|browser|bench...
#   (PYTHON=... chooses the interpreter)
set -eu
cd "$(dirname "$0")/.."

missing="" # Debian packages
wished=""  # optional packages, which some distributions lack; tests that need them are skipped
say() { printf '%s\n' "$*" >&2; }
have() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1; }
need() { have "$1" || missing="$missing $2"; }
wish() { have "$1" || wished="$wished $2"; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Each candidate is run, since a name on PATH may be a shim without a Python behind it.
find_python() {
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if new_enough "$candidate"; then
            python="$candidate"
            return 0
        fi
    done
    return 1
}

venv_works() { new_enough .venv/bin/python && .venv/bin/python -c 'import pip' >/dev/null 2>&1; }

# Debian has the headers of a Python, and the module that makes a .venv, in packages of their own.
look_for_python() {
    if ! find_python; then
        if [ -n "${PYTHON:-}" ]; then
            say "PYTHON=$PYTHON is no Python 3.11 or later"
            exit 1
        fi
        # The distribution's own Python; if that is too old, a newer one that it may offer.
        three=python3
        ! have python3 || three=python3.11
        missing="$missing $three $three-venv $three-dev"
        return 0
    fi
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    if ! venv_works && ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        missing="$missing python$version-venv"
    fi
    header='import sysconfig; open(sysconfig.get_path("include") + "/Python.h").close()'
    if ! pyfuse3_there && ! "$python" -c "$header" >/dev/null 2>&1; then
        missing="$missing python$version-dev"
    fi
}

# pyfuse3, an extra that only `make install` needs, is compiled against libfuse 3 when it is installed;
# afterwards these packages are not needed.
pyfuse3_there() { set -- .venv/lib/python3*/site-packages/pyfuse3; [ -d "$1" ]; }

look_for_c() {
    if ! have gcc || ! echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1; then
        missing="$missing gcc libc6-dev"
    fi
}

look_for_compiler() {
    pyfuse3_there && return 0
    look_for_c
    need pkg-config pkg-config
    have pkg-config && pkg-config --exists fuse3 || missing="$missing libfuse3-dev"
}

# pylibmc has wheels for some Pythons; for others it is compiled against libmemcached.
look_for_memcached_client() {
    set -- .venv/peers/lib/python3*/site-packages/pylibmc
    [ ! -d "$1" ] || return 0
    look_for_c
    [ -e /usr/include/libmemcached/memcached.h ] || missing="$missing libmemcached-dev zlib1g-dev"
}

look_for() {
    case "$1" in
    install)
        need fusermount3 fuse3
        look_for_python
        look_for_compiler
        ;;
    test)
        need strace strace
        need faketime faketime
        need fuser psmisc
        need bindfs bindfs
        need mkfs.ext4 e2fsprogs
        need debugfs e2fsprogs
        need redis-server redis-server
        need openssl openssl
        need setpriv util-linux
        need ip iproute2
        need tc iproute2
        need rsync rsync
        need promtool prometheus
        need zsh zsh
        need fish fish
        need mandoc mandoc
        look_for_c
        wish linux.uml user-mode-linux
        wish systemd-analyze systemd
        wish docker-compose docker-compose
        wish kubectl kubernetes-client
        ;;
    s3)
        need swift-ring-builder swift
        need swift-account-server swift-account
        need swift-container-server swift-container
        need swift-object-server swift-object
        need swift-proxy-server swift-proxy
        ;;
    kubernetes) # tests/kubernetes/build.sh takes etcd's program by itself: its package starts a service
        need go golang-go
        need dpkg-source dpkg-dev
        need kubectl kubernetes-client
        need setpriv util-linux
        ;;
    image) # tests/image/dockerfile.py runs the steps of the Dockerfile in such a root
        need debootstrap debootstrap
        need unshare util-linux
        need curl curl
        ;;
    packages) # the Debian package is made for the system's Python, and compiles pyfuse3 for it
        need dpkg-deb dpkg
        need mmdebstrap mmdebstrap
        need pkg-config pkg-config
        [ -x /usr/bin/python3 ] || missing="$missing python3"
        set -- /usr/include/python3*/Python.h
        [ -e "$1" ] || missing="$missing python3-dev"
        have pkg-config && pkg-config --exists fuse3 || missing="$missing libfuse3-dev"
        look_for_c
        ;;
    browser)
        need chromium chromium
        need npm npm
        ;;
    bench)
        need squashfuse_ll squashfuse
        need mksquashfs squashfs-tools
        need mkfs.erofs erofs-utils
        need memcached memcached
        need pigz pigz
        need nutcracker nutcracker
        need iperf3 iperf3
        look_for_memcached_client
        ;;
    *)
        say "deploy/prepare.sh: no such group: $1"
        exit 2
        ;;
    esac
}

find_root() {
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root="sudo"
    get="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install"
    [ -z "$as_root" ] || have sudo
}

install_missing() {
    if ! have apt-get; then
        say "please install what Debian calls:$missing (no apt-get here), then run make again"
        exit 1
    fi
    if ! find_root; then
        say "not root, and there is no sudo. As root, run: apt-get install$missing"
        exit 1
    fi
    say "installing system packages:$missing"
    log="$(mktemp)"
    # The lists of a fresh machine may be empty or old, so they are fetched when the first try fails.
    # shellcheck disable=SC2086 # split into words
    if ! $get $missing >"$log" 2>&1; then
        $as_root apt-get -qq update >"$log" 2>&1 || true
        if ! $get $missing >>"$log" 2>&1; then
            tail -n 15 "$log" >&2
            rm -f "$log"
            say "these could not be installed:$missing. Install them by hand, then run make again"
            exit 1
        fi
    fi
    rm -f "$log"
}

# Installs optional packages that the package lists have. Without them only some tests are skipped.
install_wished() {
    for package in $wished; do
        have apt-cache && apt-cache show "$package" >/dev/null 2>&1 && find_root || continue
        say "installing $package"
        $get "$package" >/dev/null 2>&1 || say "$package could not be installed; going on without"
    done
}

make_venv() {
    venv_works && return 0
    if ! find_python; then
        say "no Python 3.11 or later was found (tried python3.13 to python3)."
        say "Install one, for example python3.11 python3.11-venv python3.11-dev, or name it:" \
            "make install PYTHON=/path/to/python3"
        exit 1
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
}

for group in "$@"; do look_for "$group"; done
[ -z "$missing" ] || install_missing
install_wished
if ! venv_works && ! find_python; then # the installed Python was too old: try once more
    missing=""
    look_for_python
    install_missing
fi
make_venv
