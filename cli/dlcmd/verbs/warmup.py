"""The verb `warmup`."""

from diesel_fs.errors import PartialError
from diesel_fs.mounts.warmup import Amount, Warmup, WarmupReport

from ..args.options import argument, verb
from ..show.output import (
    bytes_text,
    count_text,
    json_failed,
    json_name,
    print_note,
    print_result,
    raise_if_partial,
)
from ..show.progress import shown_progress


@verb("warmup")
@argument("place", metavar="DIR[/path]")
def warmup(place: str) -> None:
    """Load the files at a path of a mount, so that reading them does not wait for the object store.

    The path is a mount point, or a folder or file below one. Files are loaded into the kernel's
    page cache, as far as the mount's --memory goes; with --cache-dir or --task also into that
    cache, as far as it has room. Files that were loaded for no plan make way. Exit code 3: there
    was no room for all, or some cannot be read.

    \b
    Examples:
      dlcmd warmup /mnt/pets
      dlcmd warmup /mnt/pets/train
    """
    job = Warmup.open(place)
    total, room = job.total, job.room
    if room.files < total.files and not job.has_cache:
        print_note(
            f"{place} has {_amount(total)}; there is memory for {_amount(room)}, so"
            f" {count_text(total.files - room.files, 'file')} will be left out"
        )
    files_done = 0
    with shown_progress(f"warm up {place}", "files") as show:

        def progress(done: int, count: int, content_bytes: int) -> None:
            nonlocal files_done
            files_done = done
            show(done, count, content_bytes)

        try:
            report = job.run(progress)
        except BaseException as error:
            if files_done:
                error.add_note(f"{count_text(files_done, 'file')} loaded so far")
            raise
    _print_report(place, job, report)


def _print_report(place: str, job: Warmup, report: WarmupReport) -> None:
    described = {
        "event": "done",
        "mountpoint": job.mountpoint,
        "dataset": job.snapshot.dataset,
        "version": job.snapshot.version,
        **json_name(job.path),
        **_json("", report.total),
        **_json("memory_", report.in_memory),
        **_json("cache_", report.in_cache),
        **_json("left_", report.left),
        "failed": json_failed(report.failed),
    }
    text = f"{_amount(report.in_memory)} of {place} are in memory"
    if report.in_cache.files:
        text += f", {_amount(report.in_cache)} in the mount's cache"
    if not report.total.files:
        text = f"{place} has no files to load"
    print_result(described, text)
    if not report.left.files:
        raise_if_partial(report.failed, place, "loaded")
        return
    try:
        raise_if_partial(report.failed, place, "loaded")
    except PartialError as error:
        report_failed = f"; {error.message.partition(';')[0]}"
    else:
        report_failed = ""
    raise PartialError(
        f"{_amount(report.left)} of {place} are not loaded: the mount on {job.mountpoint} has no"
        f" room for them{report_failed}",
        report.failed,
        advice=_advice(job),
    )


def _advice(job: Warmup) -> str:
    if job.has_cache:
        return "mount with a larger --cache-size or --memory, or warm up a part of it"
    wanted_bytes = job.memory_wanted_bytes()
    if wanted_bytes:
        return f"mount with --memory {-(-wanted_bytes >> 20)}M, or warm up a part of it"
    return "this machine has not enough memory: warm up a part of it, or mount with --cache-dir"


def _amount(amount: Amount) -> str:
    return f"{count_text(amount.files, 'file')} ({bytes_text(amount.content_bytes)})"


def _json(prefix: str, amount: Amount) -> dict[str, int]:
    return {f"{prefix}files": amount.files, f"{prefix}bytes": amount.content_bytes}
