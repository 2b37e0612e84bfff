"""The verb `completion`. `../args/completing.py` answers the printed code."""

import click

from ..args.options import argument, verb
from ..show.output import write_stdout

_BASH = r"""_dlcmd_completion() {
    local kind value rest line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=()
    while IFS=$'\t' read -r kind value rest; do
        case $kind in
        plain) COMPREPLY+=("$value") ;;
        part) COMPREPLY+=("$value"); compopt -o nospace ;;
        file) compopt -o default ;;
        dir) compopt -o dirnames ;;
        esac
        case $value in */*) compopt -o filenames -o noquote ;; esac
    done < <(_DLCMD_COMPLETE=bash _DLCMD_LINE="$line" _DLCMD_TEXT="$2" command dlcmd 2>/dev/null)
}
complete -o nosort -F _dlcmd_completion dlcmd
"""

_ZSH = r"""#compdef dlcmd
_dlcmd_completion() {
    local line kind value rest found=1
    local -a words_plain words_part words_described
    (( $+commands[dlcmd] )) || return 1
    line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX"
    while IFS=$'\t' read -r kind value rest; do
        case $kind in
        plain)
            if [[ -n $rest ]]; then
                words_described+=("${value//:/\\:}:$rest")
            else
                words_plain+=("$value")
            fi ;;
        part) words_part+=("$value") ;;
        file) _path_files && found=0 ;;
        dir) _path_files -/ && found=0 ;;
        esac
    done < <(_DLCMD_COMPLETE=zsh _DLCMD_LINE="$line" command dlcmd 2>/dev/null)
    (( $#words_described )) && _describe -V dlcmd words_described && found=0
    (( $#words_plain )) && compadd -V words -a words_plain && found=0
    (( $#words_part )) && compadd -V parts -S '' -a words_part && found=0
    return found
}
if [[ $funcstack[1] == _dlcmd ]]; then
    _dlcmd_completion "$@"
else
    compdef _dlcmd_completion dlcmd
fi
"""

_FISH = r"""function _dlcmd_completion
    set -lx _DLCMD_COMPLETE fish
    set -lx _DLCMD_LINE (commandline -cp)
    for line in (command dlcmd 2>/dev/null)
        set -l fields (string split -m 2 \t -- $line)
        switch $fields[1]
            case file
                __fish_complete_path (commandline -ct)
            case dir
                __fish_complete_directories (commandline -ct) ''
            case '*'
                printf '%s\t%s\n' $fields[2] $fields[3]
        end
    end
end
complete --no-files --command dlcmd --arguments '(_dlcmd_completion)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@verb("completion")
@argument("shell", type=click.Choice(list(SCRIPTS)))
def completion(shell: str) -> None:
    """Print the code with which a shell completes verbs, options, datasets, versions and paths.

    The Debian package installs it. Paths in a dataset come from its newest snapshot. If the
    repository does not answer within two seconds, nothing is completed.

    \b
    Examples:
      eval "$(dlcmd completion bash)"       in ~/.bashrc
      eval "$(dlcmd completion zsh)"        in ~/.zshrc, behind compinit
      dlcmd completion fish > ~/.config/fish/completions/dlcmd.fish
    """
    write_stdout([SCRIPTS[shell].encode()])
