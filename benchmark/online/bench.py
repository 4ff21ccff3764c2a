"""The online benchmark as a script: `python benchmark/online/bench.py ...` is `minisgl bench online ...`."""

import sys

from minisgl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "online", *sys.argv[1:]]))
