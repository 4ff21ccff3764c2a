"""The comparison on a CPU as a script: `python benchmark/cpu/compare.py ...` is `minisgl bench cpu ...`."""

import sys

from minisgl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "cpu", *sys.argv[1:]]))
