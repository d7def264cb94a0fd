"""Simulated clusters with auditors.

| module            | content                                                               |
|-------------------|-----------------------------------------------------------------------|
| `plan`            | the kind of cluster that a seed determines                            |
| `auditor_machine` | the machine that an auditor runs on                                   |
| `faults`          | faults of auditors, and the schedule of faults                        |
| `verdict`         | the invariants of recovery, checked from outside                      |
| `defects`         | injected defects of recovery that the verdict must report             |
"""
