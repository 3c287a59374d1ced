"""`gorila`: one command, a sub-command a role. Role code is looked up by name when it runs, so that no role's dependencies weigh on another.

Exit codes: 0 done, 1 something failed (one line says what), 2 the command was wrong (one line says how), 130 interrupted before anything ran.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer

from gorila.commands import roles, train
from gorila.commands.two_words import TwoWords
from gorila.errors import GorilaError

app = typer.Typer(
    name="gorila",
    cls=TwoWords,
    help="Distributed deep Q-learning as a stream: actors, a Beam replay pipeline, learners and parameter servers around Apache Kafka.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Start with: gorila train cartpole",
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"gorila {version('gorila-stream')}")
        raise typer.Exit


@app.callback()
def _gorila(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What holds for every command."""


train.register(app)
roles.register(app)


def _add_groups() -> None:
    from gorila.commands.broker import add_kafka_command, broker_app
    from gorila.commands.export import export_app
    from gorila.commands.inspect import register as register_inspect
    from gorila.commands.topics import register_cat, topics_app
    from gorila.commands.watch import register as register_watch
    from gorila.commands.weights import weights_app

    app.add_typer(broker_app, name="broker")
    app.add_typer(topics_app, name="topics")
    app.add_typer(export_app, name="export")
    app.add_typer(weights_app, name="weights")
    register_cat(app)
    register_watch(app)
    register_inspect(app)
    add_kafka_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code, never a traceback."""
    # Until a role opens its log, what the library has to say is in the one line of the error.
    logging.getLogger("gorila").addHandler(logging.NullHandler())
    if not app.registered_groups:
        _add_groups()
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    try:
        code = app(args=arguments, prog_name="gorila", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except GorilaError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "gorila", "producers", "pipelines", "consumers", "schemas"):
            raise
        return _say(f"this needs the package {package!r}: pip install 'gorila-stream[all]'", 1)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter complains once more on its way out
        return 1
    except OSError as error:
        return _say(f"{error.strerror or error}{': ' + str(error.filename) if error.filename else ''}", 1)
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        return _usage(error)


def _usage(error: Any) -> int:
    """What typer refuses, as one line; a command without its sub-command shows its help instead."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message())
    if type(error).__name__ == "NoArgsIsHelpError":  # rich has printed the help when it was asked for the message
        print(message, end="\n" if message else "")
        return 0
    path = context.command_path if context else "gorila"
    return _say(f"{message.rstrip('.?')}; see {path} --help", 2)


def _say(line: str, code: int) -> int:
    print(f"gorila: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
