"""The server's command line, which so far says that there is no server yet.

It takes any option, so that a script written for the coming server gets the true reason and not
"no such option", and never a process that looks as if it served.
"""

import sys

import click

import diesel_fs

_USAGE = 2  # the exit code of dlcmd for "asked for something that cannot be"


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.version_option(diesel_fs.__version__, prog_name="diesel-server")
def main() -> None:
    """Serves datasets to many machines. NOT IN THIS VERSION: use a file:// repository."""
    click.echo(
        f"diesel-server: version {diesel_fs.__version__} has no server yet; "
        "use a repository in a folder: dlcmd --url file:///path ...",
        err=True,
    )
    sys.exit(_USAGE)
