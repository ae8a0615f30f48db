"""The command `retoma`: thin, each command calls what a program would call.

A command is a plain function in a module `flows/cli_<noun>.py`, registered below. Such a module imports
Prefect and MLflow inside its functions only, so that `retoma --help` and `retoma status` answer at once.
"""

from __future__ import annotations

import inspect

import typer
from rich.console import Console

from flows import cli_files, cli_show, cli_stack, cli_train
from training.errors import KINDS, RetomaError

EXIT_CODES = "\n\n".join(
    [
        "Exit codes",
        "0 done",
        "1 an error in retoma itself",
        *(
            f"{kind.exit_code} {name}: {(inspect.getdoc(kind) or '').partition('. ')[0]}"
            for name, kind in sorted(KINDS.items(), key=lambda item: item[1].exit_code)
        ),
        "130 interrupted",
    ]
)

app = typer.Typer(
    name="retoma",
    help="It resumes: PyTorch training as an orchestrated pipeline that loses seconds when machines die.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    cli_train.train,
    cli_show.runs,
    cli_show.show,
    cli_files.restore,
    cli_stack.up,
    cli_stack.down,
    cli_stack.status,
    cli_stack.env,
    cli_stack.deploy,
):
    app.command()(command)
app.command("import")(cli_files.import_file)


def main() -> None:
    """Entry point. An error of a known kind is printed without a traceback and sets the exit code."""
    try:
        app()
    except RetomaError as error:
        show_error(error)
        raise SystemExit(error.exit_code) from None


def show_error(error: RetomaError) -> None:
    """Kind, message and hint on stderr; nothing is cut, so that links and paths can be copied."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(error.kind, style="bold red", end=": ")
    console.print(error, markup=False)


if __name__ == "__main__":
    main()
