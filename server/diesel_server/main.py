"""The command `diesel-server`: it runs the supervisor, and turns errors into exit codes."""

import logging
import sys

import click
import trio

import diesel_fs
from diesel_fs.errors import DieselError, UsageError

from .options import PREFIX, checked, options
from .process.supervisor import Supervisor

_INTERRUPTED = 130


@click.command(
    context_settings={"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]}
)
@click.version_option(diesel_fs.__version__, prog_name="diesel-server")
@options
def program(**given: object) -> None:
    """Serve datasets to many machines, from one object store and one metadata store.

    Every option may also stand in the environment (--tls-cert as DIESEL_SERVER_TLS_CERT) or in a
    TOML file (tls-cert = "..."). An option on the command line wins over the environment, and the
    environment over the file. The repository must exist, with an account to log in with:

    \b
      dlcmd --url "file:///data?meta=redis://localhost" user add NAME --admin
      diesel-server --listen 127.0.0.1:9300 --store file:///data --meta redis://localhost
    """
    wanted, warnings = checked(**given)  # type: ignore[arg-type]  # click gives them as objects
    for warning in warnings:
        click.echo(f"diesel-server: warning: {warning}", err=True)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s diesel-server %(levelname)s %(message)s",
    )
    supervisor = Supervisor(wanted, click.echo)
    sys.exit(trio.run(supervisor.run))


def main() -> None:
    try:
        program.main(standalone_mode=False)
    except click.Abort:
        sys.exit(_INTERRUPTED)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        click.echo(f"diesel-server: {error.format_message()}", err=True)
        sys.exit(UsageError.exit_code)
    except DieselError as error:
        click.echo(f"diesel-server: {error}", err=True)
        sys.exit(error.exit_code)
