"""Run all parts of the test suite, some at the same time, and close with a table: a failure hides nothing.

    python tools/run_tests.py             every part
    python tools/run_tests.py --changed   without the kernels' parts if they have passed here with these sources
    python tools/run_tests.py --levels    engines on each instruction set, kernels with each BLAS kernel of this machine

A part is one pytest process. Its output is printed when it ends; exit status 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATIC = ("tests/test_architecture.py", "tests/test_size.py", "tests/test_docs.py")  # run by `make check`
AT_ONCE = 3  # parts; those with servers mostly wait
ORDINARY = "not gpu and not slow"


@dataclass(frozen=True)
class Part:
    """Tests that run in one process. `is_kernels`: only kernels and what they import can change its results."""

    name: str
    paths: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    select: tuple[str, ...] = ("-m", ORDINARY)
    is_kernels: bool = False


STARTS = "lifecycle processes replicas listening disk_kv traces deploy nginx load replay request_log drafts"
NATIVE = "native quantized_step"
# Those that compute longest first. "others" gets what no part names, so that no test is lost.
PARTS = (
    Part("servers and pages", ("tests/e2e",)),
    Part("families", ("tests/contract",)),
    Part("C++ step", (*(f"tests/contract/test_{name}.py" for name in NATIVE.split()), "tests/unit/native")),
    Part("starts of servers", tuple(f"tests/e2e/test_{name}.py" for name in STARTS.split())),
    Part("engines", ("tests/unit/engine", "tests/unit/llm", "tests/unit/models", "tests/unit/training")),
    Part("others", ("tests",)),
    Part("scheduler", ("tests/unit/scheduler", "tests/simulation", "tests/unit/kvcache")),
    Part(
        "kernels in Triton's interpreter",
        ("tests/interpreter",),
        {"TRITON_INTERPRET": "1"},
        ("-m", ORDINARY, "-k", "not float16"),
        True,
    ),
    Part("several ranks, benchmarks", ("tests/lockstep", "tests/benchmark", "tests/unit/distributed")),
    Part("CUDA kernels on a CPU", ("tests/unit/hopper", "tests/unit/triton"), is_kernels=True),
)
# Folders of the package that no kernel imports.
BESIDE_KERNELS = ("api", "grammar", "launch", "llm", "process", "tokenizer", "tools")
CORES = ("Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake", "Sapphirerapids")  # OpenBLAS's names


@dataclass
class Result:
    """How a part ended: its exit status, its wall time, and what pytest wrote."""

    part: Part
    code: int
    seconds: float
    output: str

    def count(self, word: str) -> int:
        """Return the number before `word` in pytest's closing line."""
        found = re.findall(rf"(\d+) {word}\b", self.output[self.output.rfind("\n", 0, -1) :])
        return int(found[0]) if found else 0

    @property
    def skipped(self) -> Counter[str]:
        """The number of tests that were skipped for each reason."""
        found: Counter[str] = Counter()
        for number, reason in re.findall(r"^SKIPPED \[(\d+)\] [^:\n]+(?::\d+)?: (.*)$", self.output, re.MULTILINE):
            found[reason] += int(number)
        return found


def ignored(part: Part) -> Iterator[str]:
    """Yield the options that leave out what other parts run."""
    others = [path for other in PARTS if other is not part for path in other.paths]
    for path in (*others, *STATIC):
        if any(path != own and Path(own) in Path(path).parents for own in part.paths):
            yield f"--ignore={path}"


def run(part: Part) -> Result:
    """Run a part in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        *part.select,
        *ignored(part),
        *part.paths,
    ]
    env = os.environ | part.env
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # keep compiled modules: the tests start hundreds of processes
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        code = subprocess.call(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        output.seek(0)
        return Result(part, code, time.monotonic() - begun, output.read())


def kernel_record() -> Path:
    """Return the file that exists if the kernels' parts have passed here with these sources and packages."""
    package = ROOT / "python" / "minisgl"
    versions = sorted(f"{d.name} {d.version}" for d in distributions() if d.name in ("torch", "triton", "numpy"))
    digest = hashlib.sha256(f"{sys.version} {versions}".encode())
    for path in sorted([*package.rglob("*"), *(ROOT / "tests").rglob("*"), Path(__file__)]):
        is_beside = path.is_relative_to(package) and path.relative_to(package).parts[0] in BESIDE_KERNELS
        if path.suffix in (".py", ".cu", ".cpp", ".h") and not is_beside:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "minisgl" / "tests" / f"kernels-{digest.hexdigest()[:24]}"


def levels() -> tuple[list[Part], list[str]]:
    """Return parts that run as other machines would, and a sentence for each level that this machine does not have."""
    from minisgl.native.library import ISAS, missing_features

    parts, absent = [], []
    for isa in ISAS:
        if missing := missing_features(isa):
            absent.append(f"C++ step on {isa}: this CPU has no {', '.join(missing)}")
        else:
            paths = ("tests/contract", "tests/unit/native", "tests/unit/engine", "tests/unit/llm")
            parts.append(Part(f"C++ step on {isa}", paths, {"MINISGL_CPU_ISA": isa}))
    probe = (
        "import json, numpy, threadpoolctl; a = numpy.ones((64, 64), 'f4'); a @ a;"
        "print(json.dumps(threadpoolctl.threadpool_info()))"
    )
    for core in CORES:
        env = {"OPENBLAS_CORETYPE": core}
        done = subprocess.run([sys.executable, "-c", probe], env=os.environ | env, capture_output=True, text=True)
        used = [lib["architecture"] for lib in json.loads(done.stdout or "[]") if lib["internal_api"] == "openblas"]
        if used == [core]:
            env |= {"TRITON_INTERPRET": "1"}
            parts.append(Part(f"kernels with BLAS for {core}", ("tests/interpreter",), env, is_kernels=True))
        else:
            absent.append(f"kernels with BLAS for {core}: OpenBLAS takes {used[0] if used else 'nothing'} here")
    return parts, absent


def table(results: list[Result]) -> Iterator[str]:
    """Yield the lines of the closing table and of what was not run."""
    words = ("passed", "failed", "error", "skipped")
    yield f"{'part':<36}" + "".join(f"{word:>9}" for word in (*words, "seconds"))
    for result in results:
        counts = "".join(f"{result.count(word):>9}" for word in words)
        verdict = f"  FAILED (exit status {result.code})" if result.code else ""
        yield f"{result.part.name:<36}{counts}{result.seconds:>9.0f}{verdict}"
    for reason, number in sum((result.skipped for result in results), Counter()).most_common():
        yield f"not run: {number} {'test' if number == 1 else 'tests'}: {reason}"
    if number := sum(result.count("deselected") for result in results):
        yield f"not run: {number} tests for `make soak` (minutes long) or for a GPU (pytest -m gpu tests/gpu)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", action="store_true", help="no kernels' parts if these sources passed here")
    parser.add_argument("--levels", action="store_true", help="the instruction sets and BLAS kernels of this machine")
    args = parser.parse_args()
    begun = time.monotonic()
    parts, notes = levels() if args.levels else (list(PARTS), [])
    record, reason = kernel_record(), ""
    if find_spec("triton") is None:
        reason = "Triton is not installed"
    elif args.changed and record.exists():
        reason = "passed here with these sources, and nothing that it reads has changed"
    if reason:
        notes += [f"{part.name}: {reason}" for part in parts if part.is_kernels]
        parts = [part for part in parts if not part.is_kernels]
    results = []
    print(f"{len(parts)} parts, {AT_ONCE} at a time; each is shown when it has ended", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in as_completed([pool.submit(run, part) for part in parts]):
            results.append(result := future.result())
            print(f"\n===== {result.part.name}\n{result.output.strip()}", flush=True)
    results.sort(key=lambda result: parts.index(result.part))
    kernels = [result for result in results if result.part.is_kernels]
    is_incomplete = any(result.code or result.skipped for result in kernels)  # what was skipped has not passed
    if kernels and not args.levels and not is_incomplete:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()
    print("", *table(results), *(f"not run: {note}" for note in notes), sep="\n")
    failed = sum(result.count("failed") + result.count("error") for result in results)
    broken = sum(result.code != 0 for result in results)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes; {broken} of {len(results)} parts failed")
    print(
        f"{sum(r.count('passed') for r in results)} passed, {max(failed, broken)} failed, "
        f"{sum(r.count('skipped') for r in results)} skipped"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
