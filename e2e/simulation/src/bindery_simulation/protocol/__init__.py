"""Simulate the ledger protocol alone: the state machines of `bindery_core`, model bookies, one metadata node.

| module           | content                                                                 |
|------------------|-------------------------------------------------------------------------|
| `history`        | one history of one seed: profile, faults, their end, liveness, verdict  |
| `profiles`       | the events of a history, and the probabilities of its faults            |
| `world`          | messages in flight, time, crashes, partitions                           |
| `endpoint`       | the interface of a client to the world                                  |
| `bookie`         | the model of a bookie                                                   |
| `ledger`         | the state of the ledger, and the checks                                 |
| `invariants`     | the names of the checks                                                 |
| `clients`        | writers and recoveries                                                  |
| `readers`        | readers of open and closed ledgers                                      |
| `maintenance`    | deletion and re-replication                                             |
| `sequence_chart` | the trace                                                               |
| `mutants`        | injected defects                                                        |
| `scenarios`      | known defects of BookKeeper as scripts                                  |
| `search`         | counts over many seeds                                                  |

A history has a few dozen messages. One processor core plays one to two thousand histories per second.
"""
