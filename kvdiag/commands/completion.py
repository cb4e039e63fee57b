"""`kvdiag completion`: the script that lets a shell complete commands, options and their values."""

import sys

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and their values in SHELL.

    \b
    eval "$(kvdiag completion bash)"     in ~/.bashrc
    eval "$(kvdiag completion zsh)"      in ~/.zshrc
    kvdiag completion fish | source      in ~/.config/fish/config.fish
    """  # noqa: D301 - \b is click's mark for a paragraph that keeps its lines
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    script = made(context.find_root().command, {}, "kvdiag", "_KVDIAG_COMPLETE")
    # Its `source()` starts bash to ask for its version, and warns where there is none.
    sys.stdout.write(script.source_template % script.source_vars())
