"""`dlcmd completion`: what a shell evaluates to complete verbs, options and their values."""

import click
from click.shell_completion import get_completion_class

from .options import verb
from .output import emit

COMPLETE = "_DLCMD_COMPLETE"
"""The variable of the environment in which a shell says that it asks for completions."""


@verb("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete verbs, options, their values, and names of files.

    \b
    Examples:
      eval "$(dlcmd completion bash)"       in ~/.bashrc
      eval "$(dlcmd completion zsh)"        in ~/.zshrc
      dlcmd completion fish > ~/.config/fish/completions/dlcmd.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    command = click.get_current_context().find_root().command
    emit([kind(command, {}, "dlcmd", COMPLETE).source().encode(), b"\n"])
