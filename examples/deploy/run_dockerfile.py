"""Run the steps of the Dockerfile beside this file without a container engine, then its entry point.

    sudo python3 examples/deploy/run_dockerfile.py [--build-arg NAME=VALUE ...] -- --no-auth --port 1919

The steps see a copy of this machine's files (overlayfs in a mount namespace of their own, in memory), so nothing stays
behind. It needs root and Linux. What it cannot show: the image that FROM names, whose place this machine takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = Path(__file__).with_name("Dockerfile")
CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"
OVERLAY = """
mount -t tmpfs none "$0" && mkdir "$0"/upper "$0"/work "$0"/root &&
mount -t overlay overlay -o "lowerdir=/,upperdir=$0/upper,workdir=$0/work" "$0"/root &&
cd "$0"/root && mount --rbind /dev dev && mount -t proc proc proc && mount -t tmpfs none tmp && exec "$@"
"""


def instructions() -> list[tuple[str, str]]:
    """Return (name, rest) of each instruction."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def run(build_args: dict[str, str], arguments: list[str], root: Path) -> int:
    """Run all instructions in `root`, which has this machine's files; return the entry point's exit code."""
    kept = re.compile(r"LANG|PIP_\w+|\w*_proxy|\w*_PROXY|SSL_CERT_\w+")  # how this machine finds packages
    env, args = {name: value for name, value in os.environ.items() if kept.fullmatch(name)}, {}
    env |= {"HOME": "/root", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    folder, user = Path("/"), "root"

    def inside(command: list[str]) -> list[str]:
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in (args | env).items() if name.isidentifier())
        script = f"cd {folder} && export {words} && exec {shlex.join(command)}"
        return ["env", "-i", CHROOT, f"--userspec={user}:{user}", str(root), "/bin/sh", "-c", script]

    for name, rest in instructions():
        print(f"--- {name} {rest}", flush=True)
        if name == "RUN":
            subprocess.run(inside(["/bin/sh", "-c", rest]), check=True)
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                found = ROOT / source
                copy = shutil.copytree if found.is_dir() else shutil.copy
                to = root / folder.relative_to("/") / (target if found.is_dir() else "")
                copy(found, to, **({"dirs_exist_ok": True} if found.is_dir() else {}))
        elif name == "WORKDIR":
            folder = Path(rest)
            (root / folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
        elif name == "ARG":
            (word,) = shlex.split(rest)
            key, _, default = word.partition("=")
            args[key] = build_args.get(key, default)
        elif name == "ENV":
            for word in shlex.split(rest):
                key, _, value = word.partition("=")
                env[key] = value.replace(f"${key}", env.get(key, ""))
        elif name == "USER":
            user, env["HOME"] = rest, f"/home/{rest}"
        elif name == "ENTRYPOINT":
            return subprocess.run(inside([*json.loads(rest), *arguments])).returncode
        else:
            assert name in ("FROM", "EXPOSE", "HEALTHCHECK"), f"{name} is not known here"
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of the entry point")
    options = parser.parse_args()
    if options.root:
        build_args = dict(word.split("=", 1) for word in options.build_arg)
        return run(build_args, options.arguments, Path(options.root) / "root")
    with tempfile.TemporaryDirectory(prefix="dockerfile-") as folder:
        again = [sys.executable, __file__, "--root", folder, *sys.argv[1:]]
        return subprocess.run(["unshare", "--mount", "/bin/sh", "-c", OVERLAY, folder, *again]).returncode


if __name__ == "__main__":
    sys.exit(main())
