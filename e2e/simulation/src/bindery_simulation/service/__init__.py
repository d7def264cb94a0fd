"""The real bookie and the real ledger client, simulated: whole clusters that one seed decides.

| module          | holds                                                                            |
|-----------------|----------------------------------------------------------------------------------|
| `world`         | one run: start, traffic, faults, heal, liveness, verdict                           |
| `machine`       | a host with its disk, and the process on it: bookie or client                      |
| `metadata_tree` | ZooKeeper: sessions that are lost, cut and left in doubt                           |
| `worker`        | the storage engine's workers without threads                                     |
| `faults`        | what may happen to them                                                            |
| `workload`      | what clients do; it knows nothing of faults                                        |
| `verdict`       | the invariants, judged from outside over what was seen                             |
| `mutants`       | promises broken on purpose, which the verdict must notice                          |
| `healing`       | clusters with auditors: plan, faults, verdict, mutants                             |
| `runner`        | many seeds in several processes                                                    |
| `command`       | `python -m bindery_simulation service`                                             |

Below it: `bindery_simulation.loop` (simulated time and processes), `network` with
`transport`, `disk` and `trace`.
"""
