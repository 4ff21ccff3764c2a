"""The offline benchmark as a script: `python benchmark/offline/bench.py ...` is `minisgl bench offline ...`."""

import sys

from minisgl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "offline", *sys.argv[1:]]))
