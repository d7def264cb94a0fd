"""Simulate clusters with brokers: topics, producers and consumers over real bookies. One seed determines a run.

| module           | content                                                                      |
|------------------|------------------------------------------------------------------------------|
| `world`          | one run: start, traffic, faults, their end, drain, judgement                 |
| `plan`           | topics, producers, subscriptions and consumers of a seed                     |
| `broker_machine` | a host that runs a broker                                                    |
| `gateway`        | requests of clients: the calls of the broker's topics and subscriptions      |
| `peers`          | requests between brokers over the network: moves to topics of others         |
| `calls`          | calls of clients over the network                                            |
| `workload`       | producers, consumers and the operator, which do not depend on faults         |
| `faults`         | faults of brokers                                                            |
| `settings`       | settings of brokers                                                          |
| `judging`        | the recorded history, and the invariants                                     |
| `mutants`        | injected defects that an invariant must report                               |
| `search`         | counts over many seeds                                                       |

Bookies, network, metadata and time are those of `bindery_simulation.service`.
"""
