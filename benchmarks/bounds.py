"""Lower bounds against the plans of the policies that plan on chains and on graphs.

``python -m benchmarks.bounds`` prints two tables: the uniform chain of the papers (relaxation, Checkmate's optimum,
rotor), and nets R and T at shares of their activation peak (bound, then each policy's seconds over the plain step and,
in brackets, over the bound). Everything is simulated; only the op times of R and T are measured, Python's is left out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from benchmarks.nets import NETS
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.memory import POLICIES, Budget, Trace, record, simulate
from ctdr_lightning.memory.bounds.checkmate_tableau import Graph, least_seconds, solve_tableau
from ctdr_lightning.memory.bounds.lower_bound import floor_bytes, lower_bound_seconds
from ctdr_lightning.memory.policies.rotor import ChainLink, solve

CHAINS = {8: (8, 6, 5, 4), 16: (12, 9, 7)}
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def uniform_chain(n_layers: int) -> Graph:
    """Forwards of 1 s, a loss of 0 s, backwards of 2 s; every output of one byte."""
    parents: list[list[int]] = [[i - 1] if i else [] for i in range(n_layers)] + [[n_layers - 1]]
    for step in range(n_layers):
        layer = n_layers - 1 - step
        parents.append(sorted({n_layers + step, layer, *([layer - 1] if layer else [])}))
    return Graph([1.0] * n_layers + [0.0] + [2.0] * n_layers, [1] * len(parents), parents)


def chain_table(time_limit_s: float) -> None:
    print("layers  budget  relaxed  optimum  rotor   (seconds over the plain step)")
    for n_layers, budgets in CHAINS.items():
        graph, plain = uniform_chain(n_layers), 3.0 * n_layers
        table = solve([ChainLink(1, 2, 1, 1)] * n_layers, 1, 1, max(budgets))
        for budget in budgets:
            relaxed = least_seconds(graph, budget) / plain
            optimum = solve_tableau(graph, budget, time_limit_s).seconds / plain
            rotor = table.seconds[0, -1, budget - 1] / plain
            print(f"{n_layers:6d}  {budget:6d}  {relaxed:7.3f}  {optimum:7.3f}  {rotor:5.3f}", flush=True)


def policy_cell(trace: Trace, policy: str, peak_bytes: int, bound: float, time_limit_s: float) -> str:
    try:
        made = simulate(trace, POLICIES[policy](trace, Budget(peak_bytes=peak_bytes, time_limit_s=time_limit_s)))
    except InfeasibleBudgetError:
        return "none"
    return f"{made.seconds / trace.seconds:.3f} (+{made.seconds / bound - 1:.1%})"


def net_table(name: str, policies: list[str], time_limit_s: float) -> None:
    net, inputs, step = NETS[name]()
    step(net, inputs).backward()
    trace = replace(record(lambda: step(net, inputs)), python_s_per_replay=0.0)
    resident, peak = trace.resident_bytes, simulate(trace).peak_bytes
    floor = (floor_bytes(trace) - resident) / (peak - resident)
    print(f"\nnet {name}: {len(trace.forward_ops)} ops of the forward; no plan goes below {floor:.0%}")
    print("share  bound  bound ms  " + "  ".join(f"{policy:>16}" for policy in policies))
    for share in SHARES:
        budget = int(resident + share * (peak - resident))
        start = time.perf_counter()
        bound = lower_bound_seconds(trace, budget)
        took_ms = 1e3 * (time.perf_counter() - start)
        cells = [policy_cell(trace, policy, budget, bound, time_limit_s) for policy in policies]
        row = "  ".join(f"{cell:>16}" for cell in cells)
        print(f"{share:5.0%}  {bound / trace.seconds:5.3f}  {took_ms:8.0f}  {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", default=["R", "T"], choices=sorted(NETS))
    parser.add_argument("--policies", nargs="+", default=["checkmate", "rotor", "optimal", "optimal_fast"])
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a plan")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chain_table(args.time_limit * 3)
    for name in args.nets:
        net_table(name, args.policies, args.time_limit)


if __name__ == "__main__":
    main()
