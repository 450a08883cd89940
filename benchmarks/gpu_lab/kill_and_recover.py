"""A process per GPU, of which one is killed: the others must name it, recover without it, and go on with right results.

The ranks are started here, not by torchrun, which would end them all with the one that is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_lab.experiments import PYTHON, ROOT

BOUNDARY = (
    "Seconds on each rank that was left: from the moment at which all ranks had met and the last one killed itself to "
    "the exception that names it, and of `recover`, which leaves it out. Then each rank has dispatched and combined 5 "
    "times, and every row was compared with the oracle."
)
_ROUNDS = 5
_TIMEOUT = 10.0
_HUNG_SECONDS = 25.0


def be_a_rank() -> dict[str, Any]:
    """Work until the last rank is killed, recover, and go on; return what happened when."""
    import torch

    import deep_ep_py as deep_ep
    from cases import Case
    from deep_ep_py.tools.bench.gpu_ranks import gpu_per_rank
    from deep_ep_py.transport.bootstrap.groups import make_bootstrap
    from gpu_ranks import make_warm
    from harness import Trial, dispatch_arguments, left_out

    with gpu_per_rank() as group:
        rank, ranks = group.rank(), group.size()
        case = Case("killed", ranks, 40, hidden=256, topk=2, experts=2 * ranks)
        trial, victim = Trial.of(case), ranks - 1
        rest = left_out(trial, [victim])
        buffer = make_warm(group, case, timeout=_TIMEOUT)
        given = {name: value.to(buffer.device) for name, value in dispatch_arguments(trial.work, rank).items()}

        def round_trip(wanted: Trial) -> None:
            x, weights = wanted.expert.x[rank].to(buffer.device), wanted.expert.topk_weights[rank].to(buffer.device)
            results = buffer.dispatch(**given)
            combined = buffer.combine(x, results[4], topk_weights=weights)
            torch.cuda.synchronize()
            buffer.check()
            wanted.check_dispatch(rank, results)
            wanted.check_combine(rank, combined)

        for _ in range(_ROUNDS):
            round_trip(trial)
        make_bootstrap(group).all_gather(None)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        killed = time.monotonic()
        try:
            while True:
                round_trip(trial)
        except deep_ep.DeepEPError as error:
            said = str(error)
        named = time.monotonic()
        lost = buffer.lost_ranks()
        buffer.recover(lost)
        recovered = time.monotonic()
        for _ in range(_ROUNDS):
            round_trip(rest)
        found = {"rank": rank, "named": named - killed, "recovered": recovered - named, "lost": lost, "said": said}
        print(json.dumps(found), flush=True)
        # The group has lost a member: nothing that ends it in order need return.
        os._exit(0)


def start_rank(environment: dict[str, str]) -> Any:
    """Start a rank; its output is a line of JSON."""
    command = [PYTHON, "-m", "benchmarks.gpu_lab.kill_and_recover", "--be-a-rank"]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def kill_and_recover(ranks: int) -> list[dict[str, Any]]:
    """Start the ranks, and return what those that were left say."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = [
        start_rank({name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()})
        for rank in range(ranks)
    ]
    until, said = time.monotonic() + _HUNG_SECONDS, []
    try:
        for rank, process in enumerate(running):
            code = process.wait(max(0.1, until - time.monotonic()))
            wanted = -signal.SIGKILL if rank == ranks - 1 else 0
            if code != wanted:
                raise RuntimeError(f"rank {rank} ended with {code}, expected {wanted}")
            said += [json.loads(line) for line in process.stdout if line.startswith("{")]
    finally:
        for process in running:
            process.kill()
    return said


@click.command()
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True, help="Number of ranks, each with a GPU.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--be-a-rank", "is_rank", is_flag=True, hidden=True)
def main(ranks: int, json_file: Path | None, is_rank: bool) -> None:
    """Kill a rank, and see what the others do."""
    if is_rank:
        be_a_rank()
        return
    said = kill_and_recover(ranks)
    for one in said:
        print(one["said"])
    named = re.compile(rf"rank {ranks - 1}'s process \(pid \d+\) has died")
    rows = [
        [one["rank"], one["named"], one["recovered"], "yes" if named.search(one["said"]) else "no", str(one["lost"])]
        for one in said
    ]
    columns = ["rank", "s until it raised", "s of recover", "names the cause", "ranks left out"]
    table = {"title": f"Rank {ranks - 1} of {ranks} was killed", "columns": columns, "rows": rows}
    if json_file is not None:
        json_file.write_text(json.dumps({"boundary": BOUNDARY, "tables": [table]}, indent=2) + "\n")
    if len(said) != ranks - 1 or any(one["lost"] != [ranks - 1] for one in said):
        sys.exit("a rank did not leave out exactly the one that was killed")


if __name__ == "__main__":
    main()
