"""The command `retoma`: thin, each command calls what a program would call.

A command is a plain function in a module `flows/cli_<noun>.py`, registered below. Such a module imports
Prefect and MLflow inside its functions only, so that `retoma --help` and `retoma status` answer at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import typer
from rich.console import Console

from flows import cli_care, cli_drill, cli_files, cli_gc, cli_show, cli_stack, cli_train
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
COMMANDS: dict[str, Callable[..., None]] = {
    "train": cli_train.train,
    "runs": cli_show.runs,
    "show": cli_show.show,
    "restore": cli_files.restore,
    "import": cli_files.import_file,
    "verify": cli_care.verify,
    "compact": cli_care.compact,
    "gc": cli_gc.gc,
    "pin": cli_care.pin,
    "unpin": cli_care.unpin,
    "up": cli_stack.up,
    "down": cli_stack.down,
    "status": cli_stack.status,
    "env": cli_stack.env,
    "deploy": cli_stack.deploy,
    "drill": cli_drill.drill,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


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
