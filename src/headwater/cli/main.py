"""Entry of `headwater`: finds the verb, runs it, and turns errors into one clear line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 not ready in time, 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

from headwater import __version__

OK = 0
FAILED = 1
USAGE = 2
NOT_READY = 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code is returned, never raised."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"headwater {__version__}")
        return OK
    from headwater.cli.verbs import VERBS
    from headwater.config.load import nearest

    if not arguments or arguments[0] in ("-h", "--help"):
        _print_verbs()
        return OK if arguments else USAGE
    name = arguments[0]
    if name not in VERBS:
        near = nearest(name, VERBS)
        return _complain(
            f"unknown command {name!r}", f"did you mean `headwater {near}`?" if near else "headwater --help"
        )
    return _run(name, arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    from headwater.cli.engine_flags import parse_arguments
    from headwater.cli.verbs import parser_of, runner_of
    from headwater.errors import HeadwaterError

    try:
        code = runner_of(name)(parse_arguments(parser_of(name), arguments))
        sys.stdout.flush()
        return code
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else OK
    except HeadwaterError as error:
        if _debugging(arguments):
            raise
        return _complain(error.message, error.hint, _exit_code(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does. Keep the interpreter from flushing into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if _debugging(arguments):
            raise
        return _complain(f"{type(error).__name__}: {error}", "add --log-level debug for the traceback", FAILED)


def _exit_code(error: Exception) -> int:
    from headwater.errors import ConfigError, DeadlineExceeded

    if isinstance(error, ConfigError):
        return USAGE
    return NOT_READY if isinstance(error, DeadlineExceeded) else FAILED


def _print_verbs() -> None:
    from headwater.cli.verbs import VERBS

    print("usage: headwater VERB ...\n\nDistributed serving of large language models.\n")
    for name, verb in VERBS.items():
        print(f"  {name:<12}{verb.summary}")
    print("\n`headwater VERB --help` says more. `headwater --version` prints the version.")


def _complain(message: str, hint: str | None, code: int = USAGE) -> int:
    print(f"headwater: error: {message}", file=sys.stderr)
    if hint:
        print(f"headwater: hint: {hint}", file=sys.stderr)
    return code


def _debugging(arguments: list[str]) -> bool:
    """Read off the raw words, because the error may be that they cannot be parsed."""
    if os.environ.get("HEADWATER_LOG_LEVEL", "").lower() == "debug" or "--log-level=debug" in arguments:
        return True
    return ("--log-level", "debug") in pairwise(arguments)


if __name__ == "__main__":
    sys.exit(main())
