"""The command ``crossmesh``: ``python -m crossmesh explain ...``."""

import signal
import sys

from . import _native


def main() -> int:
    # The command has no Python to run between its signals: it handles them, or ends by them, as a program of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return _native.main(["crossmesh", *sys.argv[1:]], [sys.executable, "-m", "crossmesh"])


if __name__ == "__main__":
    sys.exit(main())
