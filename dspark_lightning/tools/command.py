"""The command that is running, for the files it writes."""

import shlex
import sys


def command_line() -> str:
    """As it would be typed."""
    return shlex.join(["dspark", *sys.argv[1:]])
