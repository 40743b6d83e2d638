"""The commands, their options, and how their errors are told."""

from __future__ import annotations

import typer
from typer.exceptions import TyperException

from .. import __version__, native
from .bench import bench
from .clip import clip
from .demo import demo
from .errors import UserError, printable
from .replay import replay
from .verify.command import verify

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Gradient clipping that is right, fast and explains itself.",
)
app.command()(demo)
app.command()(clip)
app.command()(bench)
app.command()(verify)
app.command()(replay)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gradclip {__version__}, core: {native.core()}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Say which version this is."),
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Runs a command; its exit code."""
    try:
        return int(app(arguments, prog_name="gradclip", standalone_mode=False) or 0)
    except TyperException as error:
        return _told(error.format_message() or "what should be done? see gradclip --help")
    except UserError as error:
        return _told(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _told(message: str) -> int:
    typer.echo(f"gradclip: {printable(' '.join(message.split()))}", err=True)
    return 2
