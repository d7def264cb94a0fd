"""The ledger protocol alone, simulated: the pure state machines of `bindery_core`, model bookies, one metadata node.

| module       | holds                                                                     |
|--------------|---------------------------------------------------------------------------|
| `history`    | one history from one seed: a profile, faults, heal, liveness, verdict     |
| `profiles`   | what a history is about, and how its faults are drawn                     |
| `world`      | messages in flight, time, crashes, partitions                             |
| `bookie`     | what a bookie keeps                                                       |
| `ledger`     | what really happened to the ledger, and the checks                        |
| `invariants` | their names                                                               |
| `clients`    | the update loop; writers and recoveries                                   |
| `readers`    | readers of open and closed ledgers                                        |
| `maintenance` | deletion and re-replication                                               |
| `sequence_chart` | the readable trace                                                    |
| `mutants`    | known defects, put in on purpose                                          |
| `scenarios`  | known defects of BookKeeper, played by hand                               |
| `command`    | `python -m bindery_simulation protocol`                                   |

Many small histories beat few long ones: a history is a few dozen messages, a core plays a thousand or two a second.
"""
