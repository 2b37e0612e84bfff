#!/bin/bash
# Builds Kubernetes' control plane for the tests of tests/kubernetes/cluster, into build/kubernetes.
#
# There is no package of it: Debian packages kubectl alone, but its *source* package has all of
# Kubernetes 1.20.2 and what that needs. apt fetches and checks it by this machine's own sources, to
# which a private copy adds the source packages; the machine's configuration stays as it is. etcd is
# unpacked from its package and not installed, since the package would start a service.
#
# README.md beside this file says what a build needs. What has been built is not built again until
# this file changes.
set -euo pipefail

here="$(cd "$(dirname "$0")" && pwd)"
out="$here/../../build/kubernetes"
stamp="$(sha256sum <"$here/build.sh")"
programs=(kube-apiserver kube-controller-manager kube-scheduler)
say() { printf '%s\n' "$*" >&2; }

if [ -e "$out/stamp" ] && [ "$(cat "$out/stamp")" = "$stamp" ]; then
    exit 0
fi
mkdir -p "$out"
out="$(cd "$out" && pwd)"
rm -f "$out/stamp"
rm -rf "$out"/work.* # what a build left that was killed
work="$(mktemp -d "$out/work.XXXXXX")"
log="$out/build.log"
: >"$log"
finish() {
    status=$?
    rm -rf "$work"
    [ "$status" -eq 0 ] || say "the build failed; the end of $log:" "$(tail -n 15 "$log")"
}
trap finish EXIT

# Copies of the machine's own lists, in both forms that apt knows. What signs them stays the same.
copy_sources() {
    eval "$(apt-config shell list Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
    for file in "$list" "$parts"/*.list "$parts"/*.sources; do
        [ -f "$file" ] || continue
        case "$file" in
        *.sources) sed 's/^Types:.*/Types: deb deb-src/' "$file" ;;
        *) sed -n '/^deb[[:space:]]/{p;s/^deb/deb-src/p}' "$file" ;;
        esac >"$work/apt/sources/${file##*/}"
    done
}

# An unprivileged apt may use these folders, too. As root it would fetch as the user _apt, who may not
# write to $work.
private_apt() {
    apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/apt/sources" \
        -o Dir::State::lists="$work/apt/lists" -o Dir::Cache="$work/apt" \
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none "$@" >>"$log" 2>&1
}

say "fetching the sources of Kubernetes"
mkdir -p "$work/apt/sources" "$work/apt/lists/partial" "$work/apt/archives/partial"
copy_sources
private_apt update
mkdir "$work/packages"
cd "$work/packages"
private_apt download etcd-server golang-github-modern-go-reflect2-dev
for package in *.deb; do dpkg-deb -x "$package" .; done
private_apt source kubernetes
unpacked=(kubernetes-*/)
if [[ ! ${unpacked[0]} =~ really1\.20\.|kubernetes-1\.20\. ]]; then
    say "this script builds Kubernetes 1.20, as Debian 12 has it; these sources are ${unpacked[0]%/}"
    exit 1
fi

# As Kubernetes' own scripts of this release do (hack/lib/init.sh, hack/lib/golang.sh): GOPATH instead
# of modules, so that what the sources bring in `vendor` is taken.
export GOPATH="$work/go" GOCACHE="$work/cache" GOTMPDIR="$work" GO111MODULE=off CGO_ENABLED=0 GOFLAGS=
tree="$GOPATH/src/k8s.io/kubernetes"
mkdir -p "$GOPATH/src/k8s.io"
mv "${unpacked[0]}" "$tree"
cd "$tree"

# The release's own copy of this library corrupts memory when Go is 1.18 or later: the API server
# crashes at the first custom resource. Debian packages the release in which that was mended.
reflect=github.com/modern-go/reflect2
rm -r "vendor/$reflect"
cp -r "$work/packages/usr/share/gocode/src/$reflect" "vendor/$reflect"

# The one generated file that the archive lacks, by the rule of build/root/Makefile.generated_files:
# the OpenAPI definitions of all built-in kinds, which server-side apply needs.
say "generating the OpenAPI definitions"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen >>"$log" 2>&1
packages="$(grep -rl --include='*.go' '+k8s:openapi-gen=' cmd pkg plugin staging/src |
    grep -v -e /code-generator/ -e /sample-apiserver/ |
    xargs -n 1 dirname | LC_ALL=C sort -u |
    sed 's#^staging/src/#vendor/#; s#^#k8s.io/kubernetes/#' | paste -s -d ,)"
GOROOT="$(go env GOROOT)" "$work/openapi-gen" --logtostderr -i "$packages" \
    -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" >>"$log" 2>&1

# hack/lib/version.sh knows the release, and which variables of the programs tell it.
version="$(bash -c 'KUBE_GO_PACKAGE=k8s.io/kubernetes; . hack/lib/version.sh; kube::version::ldflags')"
say "building ${programs[*]} (some minutes)"
go build -o "$work/" -trimpath -tags providerless -ldflags "-s -w -buildid= $version" \
    "${programs[@]/#/./cmd/}" >>"$log" 2>&1

cd "$out"
mv "$work/packages/usr/bin/etcd" "${programs[@]/#/$work/}" .
printf '%s\n' "$stamp" >stamp
