"""Simulate whole clusters of real bookies and real ledger clients. One seed determines a run.

| module           | content                                                                |
|------------------|------------------------------------------------------------------------|
| `world`          | one run: start, traffic, faults, their end, liveness, verdict          |
| `director`       | waits within limits, unexpected errors; also for runs with brokers     |
| `cluster`        | the machines, and the operator                                         |
| `site`           | the objects that all machines share: time, network, metadata, trace    |
| `machine`        | a host and its process; clients                                        |
| `bookie_machine` | a host that runs a bookie                                              |
| `metadata_tree`  | ZooKeeper: sessions that expire or are disconnected, unknown outcomes  |
| `worker`         | workers of the storage engine without threads                          |
| `settings`       | settings of all programs                                               |
| `faults`         | faults of machines, disks, network and sessions                        |
| `workload`       | the work of clients, which does not depend on faults                   |
| `verdict`        | the invariants, checked from outside                                   |
| `mutants`        | injected defects that the verdict must report                          |
| `healing`        | clusters with auditors: plan, machine, faults, verdict, defects        |
| `search`         | counts over many seeds                                                 |

Shared with the other simulations: `bindery_simulation.loop` (simulated time and processes), `network` with
`transport`, `disk` and `trace`.
"""
