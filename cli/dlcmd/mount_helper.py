"""The programs `mount.diesel` and `umount.diesel`, which mount(8) and umount(8) start.

The device of a line in fstab is `DATASET[@VERSION]`, and each option of `dlcmd mount` is a mount
option without its dashes. This module reads them from the verb itself.

libmount's file `utab` (`utab.py`) makes umount(8) start `umount.diesel` for mounts of
`mount.diesel`: a native mount is two mounts, which umount(8) alone would call busy.
"""

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from diesel_fs.errors import DieselError, PermissionDenied, UsageError
from diesel_fs.mounts.mountpoints.mountpoint import is_alive, mounted_at, real_path
from diesel_fs.settings import private_bytes

from .args.options import HELP_NAMES, Flags, versioned_dataset
from .main import as_diesel_error, prepare_process, run
from .show.output import print_error
from .utab import update_utab
from .verbs.mount import mount as mount_verb

USAGE, BUG, INTERRUPTED, FAILED = 1, 4, 8, 32

_EXIT_CODES = {0: 0, 1: BUG, 2: USAGE, 129: INTERRUPTED, 130: INTERRUPTED, 143: INTERRUPTED}

_OF_MOUNT = re.compile(
    "(no)?(auto|user|users|owner|group|fail|suid|dev|exec|atime|diratime|relatime|strictatime"
    "|lazytime|iversion|mand|symfollow)|defaults|ro|rw|_netdev|async|sync|dirsync|loud|silent"
    "|(user|comment)=.*|[xX]-.*"
)
"""mount(8) itself acts on these, or adds them (`rw`)."""

_NOT_FOR_MOUNTS = {"foreground", "help", "json", "quiet", "url", "user", "verbose", "version"}
"""These options of `dlcmd mount` are no mount options, except that `mount_options` adds `url` and
`user` (as `username`)."""

STATE_FOLDER, CACHE_FOLDER = "/var/lib/diesel-mount", "/var/cache/diesel-mount"
"""Root's mounts use these, since at boot there is no home folder. The systemd unit names the same
ones."""

ENVIRONMENT_BYTES_MAX = 1 << 16


def mount_options() -> dict[str, click.Option]:
    names: dict[str, click.Option] = {}
    for each in mount_verb.params:
        if isinstance(each, click.Option):
            long = max(each.opts, key=len).removeprefix("--")
            if long not in _NOT_FOR_MOUNTS:
                names[long] = each
            elif long in ("url", "user"):  # `user` has another meaning to mount(8)
                names[{"user": "username"}.get(long, long)] = each
    return dict(sorted(names.items()))


def split_options(text: str) -> list[str]:
    """Commas between double quotes separate nothing, as for mount(8). The quotes are removed."""
    parts = re.findall(r'(?:[^,"]|"[^"]*"?)+', text)
    return [part.replace('"', "") for part in parts]


def dlcmd_options(given: Sequence[str], *, sloppy: bool) -> list[str]:
    """Mount options may have underscores for dashes. Raises UsageError for an option that neither
    `dlcmd mount` nor mount(8) knows, unless `sloppy`."""
    known, words = mount_options(), []
    for each in given:
        name, has_value, value = each.partition("=")
        name = name.replace("_", "-")
        option = known.get(name)
        if option is None:
            if not (sloppy or _OF_MOUNT.fullmatch(each)):
                raise _unknown(each.partition("=")[0], [*known, "env-file"])
            continue
        if option.is_flag == bool(has_value):
            form = name if option.is_flag else f"{name}=VALUE"
            raise UsageError(f"bad mount option {each!r}", advice=f"write {form}")
        spelled = max(option.opts, key=len)
        words.append(f"{spelled}={value}" if has_value else spelled)
    return words


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    if name == "remount":
        return UsageError(
            "a mounted dataset cannot be remounted", advice="unmount it, and mount it again"
        )
    near = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    advice = f"did you mean {near[0]}?" if near else "`mount.diesel --help` lists all options"
    return UsageError(f"unknown mount option {name!r}", advice=advice)


class _OptionsHelp(click.Command):
    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name if each.is_flag else f"{name}={each.make_metavar(context)}", each.help or "")
            for name, each in mount_options().items()
        ]
        text = (
            "A file of lines NAME=value for the environment, with the bucket's credentials for"
            " example. Only root may be able to read it."
        )
        with formatter.section("Mount options (-o)"):
            formatter.write_dl([("env-file=FILE", text), *rows])
        super().format_epilog(context, formatter)


@click.command("mount.diesel", cls=_OptionsHelp, context_settings=HELP_NAMES)
@click.argument("device", metavar="DATASET[@VERSION]")
@click.argument("folder", metavar="DIR")
@click.option("-o", "options", metavar="OPTIONS", multiple=True, help="Mount options, see below.")
@click.option("-s", "sloppy", is_flag=True, help="Ignore unknown mount options.")
@click.option("-f", "fake", is_flag=True, help="Check the options, and mount nothing.")
@click.option("-v", "verbose", is_flag=True, help="Print the causes of errors, too.")
@click.option("-n", "no_mtab", is_flag=True, hidden=True, expose_value=False)
@click.option("-N", "namespace", metavar="FILE", hidden=True)
@click.option("-t", "kind", metavar="TYPE", hidden=True, expose_value=False)
def mount_program(
    device: str,
    folder: str,
    options: Sequence[str],
    sloppy: bool,
    fake: bool,
    verbose: bool,
    namespace: str | None,
) -> None:
    """Mount a dataset. mount(8) starts this program for the type `diesel`, also from fstab.

    The device is DATASET[@VERSION], and each option of `dlcmd mount` is a mount option without its
    dashes: `--memory 1G` is `memory=1G`. Only `--user` has another name, `username`. A value with a
    comma stands in double quotes. The mount is always read-only. mount(8)'s own options (`noauto`,
    `nofail`, `_netdev`, `x-systemd.automount`, `user`, `noexec`) may stand there, too.

    A mount of root has its logs in /var/lib/diesel-mount/diesel, and reads no configuration file of
    root. `umount DIR` unmounts it.

    \b
    Examples:
      mount -t diesel pets /mnt/pets -o url=file:///data/repository,allow-other
    In /etc/fstab:
      pets /mnt/pets diesel url=s3://b/p,env-file=/etc/diesel/pets.env,allow-other,_netdev 0 0
      pets /mnt/pets diesel url="diesel://a:1,b:1",username=me,key-file=/etc/diesel/key,_netdev 0 0

    \b
    Exit codes are those of mount(8): 0 mounted, 1 wrong usage, 4 an unexpected error,
    8 interrupted, 32 the mount failed.
    """
    if namespace is not None:
        raise UsageError(
            "-N is not supported", advice="run mount in the namespace: nsenter --mount"
        )
    name, version = versioned_dataset(device)
    given = split_options(",".join(options))
    environment = [each for each in given if re.match("env[-_]file=", each)]
    others = [each for each in given if each not in environment]
    words = dlcmd_options(others, sloppy=sloppy)
    is_noexec = _last_of(others, "noexec", "exec") == "noexec"
    # With --follow, later versions would be new mounts without noexec
    if is_noexec and "--follow" in words and not os.geteuid():
        raise UsageError("noexec and follow exclude each other", advice="leave out one of the two")
    if fake:
        mount_verb.make_context("mount", [*words, "--", device, folder], obj=Flags())
        return
    if not os.geteuid():
        _use_system_folders()
    for each in environment:
        _load_environment(Path(each.partition("=")[2]))
    mountpoint = real_path(folder)
    if _is_mounted(mountpoint, name, version):  # as when `mount -a` runs again
        click.echo(f"{device} is already mounted on {mountpoint}", err=True)
        return
    code = run([*["-v"][:verbose], "-q", "mount", *words, "--", device, mountpoint])
    if code:
        raise click.exceptions.Exit(_EXIT_CODES.get(code, FAILED))
    if not os.geteuid():
        if is_noexec:
            _forbid_programs(mountpoint)
        _note_helper(mountpoint)


@click.command("umount.diesel", context_settings=HELP_NAMES)
@click.argument("folder", metavar="DIR")
@click.option("-l", "lazy", is_flag=True, help="Detach the mount now; open files stay readable.")
@click.option("-f", "force", is_flag=True, help="End the mount now; reads under way fail.")
@click.option("-v", "verbose", is_flag=True, help="Print the causes of errors, too.")
@click.option("-n", "no_mtab", is_flag=True, hidden=True, expose_value=False)
@click.option("-r", "read_only", is_flag=True, hidden=True, expose_value=False)
@click.option("-N", "namespace", metavar="FILE", hidden=True)
@click.option("-t", "kind", metavar="TYPE", hidden=True, expose_value=False)
def umount_program(
    folder: str,
    lazy: bool,
    force: bool,
    verbose: bool,
    namespace: str | None,
) -> None:
    """Unmount a dataset. umount(8) starts this program for mounts of `mount -t diesel`.

    It works as `dlcmd umount`, and returns when the processes of the mount have ended.

    \b
    Exit codes are those of umount(8): 0 unmounted, 1 wrong usage, 32 the mount is in use.
    """
    if namespace is not None:
        raise UsageError(
            "-N is not supported", advice="run umount in the namespace: nsenter --mount"
        )
    mountpoint = real_path(folder)
    flags = [*["-v"][:verbose], "-q"]
    ways = [*["--lazy"][:lazy], *["--force"][:force]]
    code = run([*flags, "umount", *ways, "--", mountpoint])
    if code:
        raise click.exceptions.Exit(_EXIT_CODES.get(code, FAILED))
    if not os.geteuid():
        update_utab(None, mountpoint)


def _last_of(given: Sequence[str], *names: str) -> str | None:
    """The options undo each other, so the last one counts."""
    return next((each for each in reversed(given) if each in names), None)


def _use_system_folders() -> None:
    for folder in (STATE_FOLDER, CACHE_FOLDER):
        try:
            Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionDenied(f"cannot make {folder}: {error.strerror}") from error
    os.environ.update(HOME=STATE_FOLDER, XDG_STATE_HOME=STATE_FOLDER, XDG_CACHE_HOME=CACHE_FOLDER)
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        os.environ.pop(name, None)


def _load_environment(path: Path) -> None:
    """The format is that of systemd's EnvironmentFile."""
    content = private_bytes(path, "the environment", ENVIRONMENT_BYTES_MAX)
    for line in content.decode("utf-8", "surrogateescape").splitlines():
        name, is_set, value = line.strip().partition("=")
        if not name or name.startswith(("#", ";")):
            continue
        if not is_set or not name.isidentifier() or "\0" in value:
            raise UsageError(f"{path} has a line that is not NAME=value")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        os.environ[name] = value[1:-1] if quoted else value


def _is_mounted(mountpoint: str, name: str, version: int) -> bool:
    found = mounted_at(mountpoint)
    if found is None or not is_alive(mountpoint):
        return False
    mounted, _, mounted_version = found.source.partition("@")
    return mounted == name and (not version or mounted_version == str(version))


def _forbid_programs(mountpoint: str) -> None:
    """Makes a mount noexec, or unmounts it and raises DieselError."""
    options = "remount,bind,ro,nosuid,nodev,noatime,noexec"
    command = ["mount", "--internal-only", "-n", "-o", options, "--", mountpoint]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        run(["-q", "umount", "--lazy", "--", mountpoint])
        raise DieselError(f"{mountpoint} cannot be mounted with noexec: {done.stderr.strip()}")


def _note_helper(mountpoint: str) -> None:
    found = mounted_at(mountpoint)
    if found is not None:
        update_utab(found.source, mountpoint)


def _run_program(program: click.Command) -> NoReturn:
    prepare_process()
    flags, code = Flags(), FAILED
    try:
        ended = program.main(prog_name=program.name, standalone_mode=False, obj=flags)
        code = ended if isinstance(ended, int) else 0
    except click.exceptions.Exit as exited:
        code = exited.exit_code
    except click.ClickException as error:
        text = error.format_message().removesuffix(".")
        print_error(DieselError(text, advice=f"see `{program.name} --help`"), flags)
        code = USAGE
    except Exception as error:
        reported = as_diesel_error(error)
        print_error(reported, flags)
        code = _EXIT_CODES.get(reported.exit_code, FAILED)
    except BaseException:  # Ctrl-C, or a signal that ends this process
        code = INTERRUPTED
    sys.exit(code)


def main() -> NoReturn:
    _run_program(mount_program)


def umount_main() -> NoReturn:
    _run_program(umount_program)
