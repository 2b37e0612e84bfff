"""The verb `completion`: prints the code with which a shell completes `dlcmd`."""

import click
from click.shell_completion import get_completion_class

from .options import verb
from .output import write_stdout

COMPLETE = "_DLCMD_COMPLETE"
"""The environment variable by which a shell asks `dlcmd` for completions."""


@verb("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the code with which a shell completes verbs, options, their values, and file names.

    \b
    Examples:
      eval "$(dlcmd completion bash)"       in ~/.bashrc
      eval "$(dlcmd completion zsh)"        in ~/.zshrc
      dlcmd completion fish > ~/.config/fish/completions/dlcmd.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    command = click.get_current_context().find_root().command
    write_stdout([kind(command, {}, "dlcmd", COMPLETE).source().encode(), b"\n"])
