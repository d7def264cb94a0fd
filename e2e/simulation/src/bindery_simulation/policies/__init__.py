"""Simulate the policies of topics over hours: retention, time to live, backlog quotas, deletion of inactive topics.

The cluster is that of `bindery_simulation.topics`: real bookies and brokers with simulated disks, network, metadata and
time. Traffic is slow and timeouts are long, so that an hour costs about as much as a minute there.

| module     | content                                                                        |
|------------|--------------------------------------------------------------------------------|
| `world`    | one run: start, traffic, faults, changes of policies, their end, judgement     |
| `plan`     | topics, their policies and the changes of these, by seed                       |
| `workload` | producers, consumers, users of topics that become inactive                     |
| `model`    | what the policies allow and demand; knows nothing of the broker                |
| `judge`    | the invariants by name                                                         |
| `mutants`  | injected defects that an invariant must report                                 |
| `search`   | counts over many seeds                                                         |
"""
