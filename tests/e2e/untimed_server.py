"""The real server with given costs of its steps, which saves a third of its start. Run as a program by the tests."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from minisgl.core.errors import ConfigError, MinisglError
from minisgl.core.plan import StepCosts
from minisgl.launch.children import run_scheduler
from minisgl.launch.launch import launch_server
from minisgl.process.processes import Ready
from minisgl.settings.options import ServerArgs
from minisgl.settings.sources import parse_args


def run(args: ServerArgs, ready: Ready) -> None:
    """The process of a scheduler. Several ranks time their steps, as they must in step with each other."""
    from minisgl.engine import engine

    measure = engine.measure_costs

    def costs(run: Any, spec: Any, num_pages: int, is_async: bool) -> StepCosts:
        if spec.info.size > 1:
            return measure(run, spec, num_pages, is_async)
        found = StepCosts(1.5e-3, 6e-5, 6e-7, 7e-8)
        if spec.drafter is None:
            return found
        curves = ((2, 1e-3), (3, 1.2e-3), (5, 1.3e-3)), ((64, 1e-2), (96, 1.4e-2), (160, 2.2e-2))
        return replace(found, plain=((1, 1.2e-3), (32, 7e-3)), drafted=curves, proposed=curves if spec.draft else ())

    engine.measure_costs = costs
    run_scheduler(args, ready)


if __name__ == "__main__":
    import untimed_server  # by name, so that the spawned child finds the function

    try:
        sys.exit(launch_server(parse_args(), untimed_server.run))
    except MinisglError as e:
        print(f"minisgl: {e}", file=sys.stderr)
        sys.exit(2 if isinstance(e, ConfigError) else 1)
